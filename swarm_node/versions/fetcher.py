"""Fetcher of versions: finds a version on this disk, or downloads it and builds its folder while chunks arrive.

- Weights that another round of this home is fetching are waited for, and then shared.
- Chunks that neither a kept version nor the one being fetched has are deleted first.
- A peer that sent wrong chunks is asked later, and reported in the next heartbeat (`traffic.blames`).

A version that does not fit on the disk is not downloaded.

- The need follows from the signed manifest and the existing files: the missing chunks, and the files that `assemble`
  builds from them. A manifest with absurd sizes is never downloaded.
- No existing file is removed to make room: the error states the missing amount, and the owner decides.
- The disk may still fill up, by other programs or because of a hidden quota: that is handled when it happens.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import trio

from protocol.errors import DiskFull, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.manifest import PolicyManifest
from protocol.text.plain import size_text
from protocol.work.messages import Blame, FetchPlan, Transfer, TransferReceipt
from swarm_node.base.disk import existing
from swarm_node.base.logs import DRAWN
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.coordinator_api.origins import Origins
from swarm_node.p2p.download import DownloadProgress, FetchReport, fetch_chunks
from swarm_node.p2p.fetch import ChunkMemory
from swarm_node.p2p.host import Host
from swarm_node.versions import assemble
from swarm_node.versions.assemble import Draft
from swarm_node.versions.broadcast_plans import BroadcastPlans
from swarm_node.versions.other_rounds import OtherRounds
from swarm_node.versions.progress import Download, progress_text

log = logging.getLogger(__name__)

BLAMES_KEPT = 16
"""Blames kept for the next heartbeat."""


@dataclass(frozen=True)
class HeldVersion:
    """A version whose files are on this disk, complete and verified."""

    manifest: PolicyManifest
    folder: Path


class FetchedVersion(NamedTuple):
    """A version that the fetcher has found or downloaded."""

    version: HeldVersion
    receipt: TransferReceipt | None
    """None for a version that was on the disk."""


@dataclass
class Traffic:
    """Bytes and blames since the agent started."""

    from_peers: int = 0
    from_seeder: int = 0
    from_http: int = 0
    blames: list[Blame] = field(default_factory=list)

    def add(self, report: FetchReport) -> None:
        self.from_peers += report.bytes_from["peer"]
        self.from_seeder += report.bytes_from["seeder"]
        self.from_http += report.bytes_from["origin"]
        self.blames = (self.blames + report.blames)[-BLAMES_KEPT:]

    def message(self, to_peers: int) -> Transfer:
        return Transfer(
            from_peers=self.from_peers, from_seeder=self.from_seeder, from_http=self.from_http, to_peers=to_peers
        )


class VersionFetcher:
    """Fetcher of one round's versions."""

    def __init__(
        self,
        *,
        folder: Path,
        blobs: BlobStore,
        arrivals: Arrivals,
        origins: Origins,
        plans: BroadcastPlans,
        host: Host,
        rng: Random,
        other_rounds: OtherRounds | None = None,
        memory: ChunkMemory | None = None,
    ) -> None:
        self.folder = folder
        self._blobs = blobs
        self._arrivals = arrivals
        self._origins = origins
        self._plans = plans
        self._host = host
        self._rng = rng
        self._other_rounds = other_rounds or OtherRounds(folder / "none")
        self._memory = memory or ChunkMemory()
        self._wrong_chunks: Counter[str] = Counter()
        """Count of wrong chunks by peer: peers with more are asked later."""
        self._digests: assemble.Digests = {}
        """Digests of held files, kept while a version does not fit on the disk: each try would compute them again."""
        self.download: Download | None = None
        self.traffic = Traffic()

    async def get(
        self, manifest: PolicyManifest, kept: Sequence[HeldVersion], *, patience_s: float
    ) -> FetchedVersion | None:
        """Find or download a version; None if another round still fetches its weights after `patience_s`."""
        folder = await trio.to_thread.run_sync(assemble.find, self.folder, manifest)
        if folder is not None:
            return FetchedVersion(HeldVersion(manifest, folder), None)
        if not await self._other_rounds.wait_for_shared(self.folder, manifest, slice_s=patience_s):
            return None
        with self._other_rounds.fetching(self.folder, manifest):
            await self._prune_chunks([*(version.manifest for version in kept), manifest])
            await trio.to_thread.run_sync(self._other_rounds.take_over, self.folder, manifest, self._blobs)
            try:
                return await self._build(manifest, is_first=not kept)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(assemble.clear_taken, self.folder)

    async def remove_old(self, kept: Sequence[HeldVersion], in_use: Sequence[HeldVersion]) -> None:
        """Remove the folders of versions that are neither kept nor in use, and chunks that are in no kept version.

        Chunks of the newest version that are missing in the chunk store are restored from its folder.
        """
        folders = [version.folder for version in (*kept, *in_use)]
        await trio.to_thread.run_sync(assemble.prune, self.folder, folders)
        await self._prune_chunks(version.manifest for version in kept)
        newest = kept[-1]
        await trio.to_thread.run_sync(assemble.restock, newest.folder, newest.manifest, self._blobs)

    async def _prune_chunks(self, manifests: Iterable[PolicyManifest]) -> None:
        """Delete the chunks that none of these versions has."""
        wanted = {ChunkId(chunk) for manifest in manifests for chunk in manifest.chunk_sizes()}
        await trio.to_thread.run_sync(self._blobs.prune, wanted)

    async def _build(self, manifest: PolicyManifest, *, is_first: bool) -> FetchedVersion:
        """Download and build a version from what is on this disk and what is missing."""
        was_refused = bool(self._digests)
        bases, sizes = await trio.to_thread.run_sync(self._survey_disk, manifest)
        if was_refused:  # the digests were good enough to refuse it again, but nothing is built from them
            bases, sizes = await trio.to_thread.run_sync(self._survey_disk, manifest)
        draft = await trio.to_thread.run_sync(Draft, self.folder, manifest, self._blobs, bases)
        if is_first:
            log.info("fetching version %d, the first here: %s", manifest.version, size_text(sum(sizes.values())))
        try:
            with draft.following(self._arrivals):
                plan = await self._plans.begin(manifest.version) or self._plans.substitute()
                report = await self._fetch_chunks(manifest, sizes, plan)
            folder = await trio.to_thread.run_sync(draft.finish)
            return FetchedVersion(HeldVersion(manifest, folder), self._plans.receipt(manifest, report))
        except UnknownChunk:  # a power cut damages many chunks at once, and each try finds only one
            await trio.to_thread.run_sync(self._blobs.remove_damaged, sizes)
            raise
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(draft.discard)

    def _survey_disk(self, manifest: PolicyManifest) -> tuple[dict[str, Path], dict[ChunkId, int]]:
        """Return the files to begin with, and the chunks that a version needs; raise an error if it does not fit."""
        bases = assemble.held_files(self.folder, manifest, self._digests)
        sizes = {ChunkId(chunk): size for chunk, size in manifest.chunk_sizes_for(bases).items()}
        require(self.folder, manifest, bases, sizes, self._blobs)
        self._digests.clear()
        return bases, sizes

    async def _fetch_chunks(self, manifest: PolicyManifest, sizes: dict[ChunkId, int], plan: FetchPlan) -> FetchReport:
        report = FetchReport()
        self.download = Download(manifest.version, sum(sizes.values()), report)
        try:
            await fetch_chunks(
                sizes,
                plan,
                order=[ChunkId(chunk) for chunk in manifest.chunk_sizes()],
                host=self._host,
                blobs=self._blobs,
                arrivals=self._arrivals,
                rng=self._rng,
                origin=self._origins.fetcher_for(manifest),
                another_plan=partial(self._plans.renew, manifest.version),
                blames=self._wrong_chunks,
                memory=self._memory,
                report=report,
                on_progress=self._show_progress,
            )
        finally:
            self.download = None
            self._wrong_chunks.update(blame.peer_id for blame in report.blames)
            self.traffic.add(report)
            for blame in report.blames:
                log.warning("peer sent wrong bytes peer=%s chunk=%s", blame.peer_id, blame.chunk)
        log.info(
            "version fetched version=%d seconds=%.2f from_peers=%d from_seeder=%d from_http=%d on_disk=%d",
            manifest.version,
            report.seconds,
            report.bytes_from["peer"],
            report.bytes_from["seeder"],
            report.bytes_from["origin"],
            report.bytes_on_disk,
        )
        return report

    def _show_progress(self, progress: DownloadProgress) -> None:
        if self.download is not None and self.download.advance(progress, len(self._host.connected())):
            log.info("%s", progress_text(self.download.to_json()), extra={DRAWN: True})


class VersionTooLarge(DiskFull):
    """The disk has less free space than a version needs; the version is not fetched."""

    code = "version_too_large"


def needed_bytes(manifest: PolicyManifest, held: Collection[str], missing_bytes: int) -> int:
    """Return the peak disk usage of building the version, given files with the digests in `held`.

    First all anchors grow while their chunks arrive. Then one file after the other is patched: a patch is unpacked, a
    new file is built with it, and the previous one is removed if it belongs to this version.
    """
    routes = [(entry, entry.route(held)) for entry in manifest.files]
    taken = missing_bytes + sum(route.anchor_bytes for _, route in routes)
    most = taken
    for entry, route in routes:
        before = route.anchor_bytes
        sizes = list(entry.sizes().values())
        for patch, size in zip(route.patches, sizes[len(sizes) - len(route.patches) :], strict=True):
            most = max(most, taken + patch.size_bytes + size)
            taken += size - before
            before = size
    return most


def require(
    folder: Path, manifest: PolicyManifest, held: Collection[str], sizes: Mapping[ChunkId, int], blobs: BlobStore
) -> None:
    """Raise an error if a version with chunks of these sizes needs more than the free space; blocks."""
    assemble.clear(folder)
    needed = needed_bytes(manifest, held, sum(size for chunk, size in sizes.items() if not blobs.has(chunk)))
    free = shutil.disk_usage(existing(folder)).free
    if needed > free:
        raise VersionTooLarge(
            f"Version {manifest.version} needs {size_text(needed)} of disk space, "
            f"but only {size_text(free)} are free in {folder}.",
            hint="Free some space there, or move the node's folder to a larger disk; "
            "the version is fetched as soon as there is room.",
        )
