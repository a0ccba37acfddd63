# Two images out of one file: `--target node` for the agent, `--target coordinator` for a round.
#
# - Packages are those of installers/node.lock, checked against their hashes; torch is the CPU or CUDA build that pip
#   finds. Nothing is compiled, so there is no compiler in either image.
# - Both run as a user without a name on the host, and keep all their state in /data.
FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --uid 10001 --create-home --home-dir /data swarm
WORKDIR /build
COPY installers/node.lock constraints.txt ./
RUN python -m venv /usr/local/lib/echo-swarm && /usr/local/lib/echo-swarm/bin/pip install --no-deps --require-hashes -r node.lock
ENV PATH=/usr/local/lib/echo-swarm/bin:$PATH

FROM base AS wheel
RUN pip install -c constraints.txt hatchling
COPY . .
RUN python -P -c "from hatchling.build import build_wheel; build_wheel('/dist')"

FROM base AS node
RUN pip install -c constraints.txt torch transformers
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl && swarm-node --version
USER swarm
WORKDIR /data
VOLUME /data
ENTRYPOINT ["swarm-node"]
CMD ["--help"]

FROM node AS coordinator
USER root
RUN pip install -c /build/constraints.txt 'psycopg[binary]'
USER swarm
EXPOSE 8700 8701
ENTRYPOINT ["swarm-coordinator"]
CMD ["--help"]
