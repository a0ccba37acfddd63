# Two images out of one file: `--target node` for the agent, `--target coordinator` for a round.
#
# - Packages are those of installers/node.lock, checked against their hashes; torch, transformers and psycopg, with what
#   they bring, are pinned by version alone. Nothing is compiled, so there is no compiler in either image.
# - Each runs as a user of its own without a name on the host, and keeps all its state in /data; the coordinator leaves
#   what nodes may read of it in /invitation.
FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY installers/node.lock constraints.txt ./
RUN python -m venv /usr/local/lib/echo-swarm && /usr/local/lib/echo-swarm/bin/pip install --no-deps --require-hashes -r node.lock
ENV PATH=/usr/local/lib/echo-swarm/bin:$PATH

FROM base AS wheel
RUN pip install -c constraints.txt hatchling
COPY . .
RUN python -P -c "from hatchling.build import build_wheel; build_wheel('/dist')"

FROM base AS installed
RUN pip install --only-binary :all: -c constraints.txt torch transformers
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl && swarm-node --version

FROM installed AS node
RUN useradd --uid 10002 --create-home --home-dir /data node
USER node
WORKDIR /data
VOLUME /data
# For other nodes: publish it with `-p 8703:8703`, or run `swarm-node join … --no-share`.
EXPOSE 8703
ENTRYPOINT ["swarm-node"]
CMD ["--help"]

FROM installed AS coordinator
RUN pip install --only-binary :all: -c constraints.txt 'psycopg[binary]'
RUN useradd --uid 10001 --create-home --home-dir /data swarm && install --directory --owner=swarm /invitation
USER swarm
WORKDIR /data
VOLUME /data
EXPOSE 8700 8701
ENTRYPOINT ["swarm-coordinator"]
CMD ["--help"]
