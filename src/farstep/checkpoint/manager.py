"""The checkpoints of one training: a directory for each step, of which some are kept."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from farstep.checkpoint.async_save import saved_behind
from farstep.checkpoint.elsewhere import steps_stopped
from farstep.checkpoint.handle import SaveHandle, settle
from farstep.checkpoint.listing import named
from farstep.checkpoint.loading import load, manifest_of
from farstep.checkpoint.local_disk import LocalDisk
from farstep.checkpoint.manifest import MANIFEST, Manifest, is_ours
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.report import Report
from farstep.checkpoint.retention import Retention
from farstep.checkpoint.saving import Draft, drafted, written
from farstep.checkpoint.storage import Storage, storage_of
from farstep.checkpoint.writing import Progress
from farstep.dist import operation
from farstep.errors import CheckpointBusy, CheckpointError, DamagedCheckpoint, NoCheckpoint
from farstep.state.adapters.ranks import Group

__all__ = ["CheckpointManager", "Resumed", "check_files"]

_DIRECTORY = re.compile(r"step_(\d{1,18})")
_DIGITS = 9


class Resumed(int):
    """The step that `resume` has loaded. `skipped` has the newer ones that it could not, with what is wrong with each; `report` is that of the load."""

    skipped: Mapping[int, str]
    report: Report

    def __new__(cls, step: int, skipped: Mapping[int, str], report: Report) -> Resumed:
        found = super().__new__(cls, step)
        found.skipped, found.report = skipped, report
        return found

    def __getnewargs__(self) -> Any:
        return int(self), self.skipped, self.report


class CheckpointManager:
    """Saves a training's state by step, and finds it again.

        manager = CheckpointManager("runs/7", keep_last=3, keep_best=1, best="min", keep_every=10_000)
        step = manager.resume(state)                      # None: there is nothing yet
        manager.async_save(state, step, metric=loss)

    Each checkpoint is a directory of its own, `step_000000100`, which `load` and the command line read as any other. When a new one is whole, those go
    that are kept for no reason: the last `keep_last`, the `keep_best` whose metric is the least (`best="min"`) or greatest, and those whose step is a
    multiple of `keep_every`. With no reason given all are kept. The newest stays in any case, and the one that was just saved. A directory that is not called so, and a file that no save
    writes, are never touched. A step that is a symbolic link is loaded, and never removed or written through; a checkpoint that is damaged, by its manifest or because `resume` has found it so, counts for nothing and is left for you to look at.

    `metric` is a number, or a mapping of several, of which `monitor` names the one that counts. What is not finite is no metric. Of ranks that give different ones the first's counts,
    and a warning says so.

    All ranks of the group make a manager with the same arguments, and call `save`, `async_save` and `resume` together; anything else, each for itself. One manager at a time works in a directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        keep_last: int | None = None,
        keep_best: int | None = None,
        best: Literal["min", "max"] = "min",
        monitor: str | None = None,
        keep_every: int | None = None,
        group: Group = None,
        no_dist: bool = False,
        storage_options: dict[str, Any] | None = None,
        rpc_timeout: float | None = None,
    ) -> None:
        self._storage = storage_of(directory, storage_options)
        self._retention = Retention(keep_last, keep_best, keep_every, best)
        self._monitor, self._group, self._no_dist = monitor, group, no_dist
        self._rpc_timeout = rpc_timeout
        self._metrics: dict[int, float | None] = {}
        """Of checkpoints whose manifests have been read, or written, by this manager."""
        self._damaged: set[int] = set()
        """Those that could not be loaded. They count for nothing, and are left to be looked at."""

    # -- saving -------------------------------------------------------------------------------------------

    @operation("CheckpointManager.save")
    def save(
        self,
        state: Any,
        step: int,
        metric: float | Mapping[str, float] | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """As `farstep.checkpoint.save`, in place of any other of this step; then let go what need not be kept."""
        _refuse_swapped("save", state, step)
        storage, ranks, info = self._begun(step, metric)
        settle(ranks, f"saving into {storage}")
        with steps_stopped(state, ranks, f"saving into {storage}") as stopped:
            draft = drafted(state, storage, ranks, stopped)
            draft.info = info
            self._write(draft, progress)

    @operation("CheckpointManager.async_save")
    def async_save(
        self,
        state: Any,
        step: int,
        metric: float | Mapping[str, float] | None = None,
        *,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """As `farstep.checkpoint.async_save`. What need not be kept goes when the new one is whole, in the background too."""
        _refuse_swapped("async_save", state, step)
        storage, ranks, info = self._begun(step, metric)

        def write(draft: Draft, told: Progress) -> None:
            draft.info = info
            self._write(draft, told)

        return saved_behind(state, storage, ranks, progress, write)

    def _begun(self, step: int, metric: Any) -> tuple[Storage, Ranks, dict[str, Any]]:
        ranks = Ranks(self._group, self._no_dist, self._rpc_timeout)
        info: dict[str, Any] = {}
        error: Exception | None = None
        try:
            info = {"step": _checked_step(step), "metric": _metric(metric, self._monitor)}
        except Exception as exc:
            error = exc
        every = ranks.everyones(tuple(info.values()), f"saving into {self._storage}", error) or []
        if len({each for each, _ in every}) > 1:
            raise CheckpointError(
                f"saving into {self._storage}: the ranks have given different steps (this one {step}). Nothing has been saved"
            )
        metrics = {each for _, each in every} - {None}
        if len(metrics) > 1:
            with ranks.all_or_none(f"saving into {self._storage}"):  # a warning may be an error
                if ranks.rank == 0:
                    warnings.warn(
                        f"saving step {step} into {self._storage}: the ranks have given different metrics, from {min(metrics)} to {max(metrics)}. That of the first rank counts, "
                        f"{info['metric']}: give all the same, such as a mean over the ranks",
                        RuntimeWarning,
                        stacklevel=3,
                    )
        return self._storage.at(_name(step)), ranks, info

    def _write(self, draft: Draft, progress: Progress | None) -> None:
        written(draft, progress)
        step = draft.info["step"]
        self._damaged.discard(step)
        with draft.ranks.all_or_none(
            draft.doing
        ):  # nobody goes on before what is not kept is gone: all see the same steps
            if draft.ranks.rank == 0:
                self._metrics[step] = draft.info["metric"]
                self._let_go_of_others(draft)

    def _let_go_of_others(self, draft: Draft) -> None:
        try:
            self._let_go(draft.info["step"])
        except Exception as exc:
            warnings.warn(
                f"{draft.storage} has been saved, but older checkpoints could not be removed ({type(exc).__name__}: {exc}); the next save tries again",
                RuntimeWarning,
                stacklevel=4,
            )

    def _let_go(self, saved: int) -> None:
        """What no reason keeps, and what saves have left that did not finish."""
        steps, unfinished = self._found()
        metrics = self._whole(steps)
        newest = max(metrics, default=saved)
        if saved < newest:
            warnings.warn(
                f"step {saved} was saved into {self._storage}, which has step {newest} already: that is what resume takes. delete({newest}) if it is not to be gone on with",
                RuntimeWarning,
                stacklevel=4,
            )
        passed = sorted(metrics.keys() - self._retention.kept(metrics))
        for step in [*passed, *unfinished]:
            if step != saved and not _is_link(self._storage.at(_name(step))):
                self._remove(step)

    def _whole(self, steps: list[int]) -> dict[int, float | None]:
        """The metrics of those that are not known to be damaged, nor have a manifest that is."""
        found = {}
        for step in steps:
            try:
                if step not in self._damaged:
                    found[step] = self._metric_of(step)
            except (DamagedCheckpoint, NoCheckpoint):
                continue
        return found

    def delete(self, step: int) -> None:
        """Remove a step's checkpoint, whole or not. By one rank; for all."""
        if step not in self._found()[0]:
            raise self._no_step(step, self.steps())
        self._remove(step)

    def _no_step(self, step: int, steps: list[int]) -> NoCheckpoint:
        return NoCheckpoint(f"{self._storage} has no checkpoint of step {step}: it has {_listed(steps)}")

    def _remove(self, step: int) -> None:
        """The manifest goes first, so that what is left of it, if this is cut short, is no checkpoint."""
        storage = self._storage.at(_name(step))
        try:
            with storage.sole_writer():
                storage.delete([MANIFEST])
                storage.delete(name for name in storage.names() if is_ours(name))
        except CheckpointBusy:
            return  # somebody is saving there
        except FileNotFoundError:
            pass
        self._metrics.pop(step, None)
        self._damaged.discard(step)
        storage.remove_if_empty()

    # -- what there is ------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Of all checkpoints, the oldest first. Whether each is whole has not been looked at."""
        return self._found()[0]

    def unfinished(self) -> list[int]:
        """Steps of which there is only what a save leaves that has not finished, or is still
        writing."""
        return self._found()[1]

    def newest(self) -> int | None:
        """The last step whose checkpoint has a manifest that is valid and all its files, as long as they should be. Their content is compared when it is loaded;
        one that this manager has found damaged then is passed over."""
        for step in reversed(self.steps()):
            try:
                if step in self._damaged:
                    continue
                check_files(self._storage.at(_name(step)))
                return step
            except (DamagedCheckpoint, NoCheckpoint):
                continue
        return None

    def best(self) -> int | None:
        """The step with the best metric; None if none has any. One that this manager has found damaged is passed over."""
        return next(iter(self._retention.ranked(self._whole(self.steps()))), None)

    def metric(self, step: int) -> float | None:
        """What a checkpoint was saved with."""
        return self._metric_of(step)

    def path(self, step: int) -> Storage:
        """Where a step's checkpoint is, or would be: what `load`, `read` and `save` take."""
        return self._storage.at(_name(step))

    def _found(self) -> tuple[list[int], list[int]]:
        """Steps that have a manifest, and steps that have only what is left by a save that does not finish, or by a removal: files of ours, or nothing."""
        steps, unfinished = [], []
        for name in self._storage.directories():
            match = _DIRECTORY.fullmatch(name)
            if match is None or _name(int(match[1])) != name:
                continue
            names = self._storage.at(name).names()
            if MANIFEST in names:
                steps.append(int(match[1]))
            elif all(map(is_ours, names)):
                unfinished.append(int(match[1]))
        return sorted(steps), sorted(unfinished)

    def _metric_of(self, step: int) -> float | None:
        if step not in self._metrics:
            self._metrics[step] = _metric_in(manifest_of(self._storage.at(_name(step))))
        return self._metrics[step]

    # -- going on -----------------------------------------------------------------------------------------

    @operation("CheckpointManager.resume")
    def resume(self, state: Any, *, step: int | None = None, **options: Any) -> Resumed | None:
        """Load the newest checkpoint that can be; the step is returned, or None if there is no checkpoint at all. The options are those of `load`.

        One that is damaged is passed over for the one before it, with a warning, and is named in the result's `skipped`; if none is whole,
        DamagedCheckpoint is raised. A state that does not fit is an error, and so is a storage that does not answer: going back would not
        mend those. With `step` that one is loaded, or else it is an error.

        With `strict=False` what a checkpoint does not have stays as it is. That cannot be, where a damaged one was begun with before: then it may have what that one has,
        which is DamagedCheckpoint too.
        """
        ranks = Ranks(self._group, self._no_dist)
        doing = f"resuming from {self._storage}"
        settle(ranks, doing)
        steps: list[int] = []
        with ranks.all_or_none(doing):
            if ranks.rank == 0:
                steps = self.steps()
        steps = ranks.from_first(steps)
        if step is not None:
            if step not in steps:
                raise self._no_step(step, steps)
            return Resumed(step, {}, self._load(state, step, options))
        skipped: dict[int, str] = {}
        begun: list[int] = []
        for each in reversed(steps):
            try:
                report = self._load(state, each, options)
            except (DamagedCheckpoint, NoCheckpoint) as exc:
                skipped[each] = str(exc)
                if isinstance(exc, DamagedCheckpoint) and exc.is_partly_loaded:
                    begun.append(each)
                continue
            with ranks.all_or_none(doing):
                if begun and (report.missing or report.reshaped or report.unsaved):
                    left = named([*report.missing, *report.reshaped, *report.unsaved])
                    raise DamagedCheckpoint(
                        f"{doing}: step {each} has been loaded, but what it does not have ({left}) may have been overwritten from {_listed(begun)}, which is damaged. "
                        f"Make the state anew, and resume with step={each}"
                    )
            if skipped:
                warnings.warn(
                    f"{doing}: step {each} has been loaded, and not {_listed(list(skipped))}, which cannot be: {'; '.join(skipped.values())}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return Resumed(each, skipped, report)
        if skipped:
            raise DamagedCheckpoint(
                f"{doing}: none of its checkpoints is whole, and the state may be partly overwritten: {'; '.join(skipped.values())}"
            )
        return None

    def _load(self, state: Any, step: int, options: dict[str, Any]) -> Report:
        options = {"rpc_timeout": self._rpc_timeout, **options}
        try:
            return load(state, self.path(step), group=self._group, no_dist=self._no_dist, **options)
        except DamagedCheckpoint:
            self._damaged.add(step)
            raise


def _is_link(storage: Storage) -> bool:
    """What is elsewhere is not this manager's to remove."""
    return isinstance(storage, LocalDisk) and storage.path.is_symlink()


def _name(step: int) -> str:
    return f"step_{step:0{_DIGITS}d}"


def _refuse_swapped(call: str, state: Any, step: Any) -> None:
    if isinstance(state, int) and not isinstance(step, int):
        raise TypeError(
            f"state first, then the step: {call}(state, step). The first argument is {state!r}, "
            f"the second a {type(step).__name__}"
        )


def _checked_step(step: Any) -> int:
    if type(step) is bool or not isinstance(step, int) or not 0 <= step < 10**18:
        raise ValueError(f"the step is {step!r}: give a whole number from 0 on")
    return int(step)


def _metric(metric: Any, monitor: str | None) -> float | None:
    if isinstance(metric, Mapping):
        if monitor is None:
            raise ValueError(
                f"metric is a mapping with {', '.join(map(repr, metric))}: monitor= says which of them counts"
            )
        if monitor not in metric:
            raise ValueError(
                f"metric has no {monitor!r}, which monitor= names: it has {', '.join(map(repr, metric))}"
            )
        metric = metric[monitor]
    if metric is None:
        return None
    try:
        number = float(metric.detach() if isinstance(metric, Tensor) else metric)
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ValueError(f"metric is a number, or a mapping of numbers, not {metric!r:.100}") from exc
    return number if abs(number) < float("inf") else None


def _metric_in(manifest: Manifest) -> float | None:
    found = manifest.info.get("metric")
    return float(found) if isinstance(found, int | float) else None


def check_files(storage: Storage) -> Manifest:
    """The manifest, if all files that it names are there, as long as they should be. Raises
    DamagedCheckpoint or NoCheckpoint."""
    manifest = manifest_of(storage)
    for file in manifest.files:
        try:
            stored = storage.open(file.name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{storage}: the file {file.name} is missing") from None
        try:
            if file.nbytes and stored.read_into(file.nbytes - 1, memoryview(bytearray(1))) != 1:
                raise DamagedCheckpoint(
                    f"{storage}: the file {file.name} is shorter than its {file.nbytes} bytes"
                )
        finally:
            stored.close()
    return manifest


def _listed(steps: list[int]) -> str:
    return f"step {', '.join(map(str, steps))}" if steps else "none"
