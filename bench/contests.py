"""Which contests there are, what is asked of them, and the part of RESULTS.md that shows how they went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench import checkpoints, optim_state
from bench.contest import Contest, Match, Outcome
from bench.sharded import FSDP_SIZES, FSDP_STEPS, LARGE, MEDIUM

_FRESH_BYTES = 1 << 30
"""What a full state takes anew, twice."""
_REDUCING = "gradients reduced, step, new values on all ranks"
_STEP = "the step alone, gradients reduced before"
ZERO = Contest(
    "zero",
    "zero",
    2,
    [
        Match(f"{_REDUCING}; torch's default", "all-reduce, torch", "reducing, farstep", 2.0),
        Match(f"{_REDUCING}; torch's tuned", "all-reduce, torch tuned", "reducing, farstep", 1.5),
        Match(f"{_STEP}; torch's default", "torch", "farstep", 2.0),
        Match(f"{_STEP}; torch's tuned", "torch tuned", "farstep", 1.5),
        Match(
            f"{_REDUCING}; torch's default, ours by messages",
            "all-reduce, torch",
            "reducing, farstep, messages",
        ),
        Match(
            f"{_REDUCING}; torch's tuned, ours by messages",
            "all-reduce, torch tuned",
            "reducing, farstep, messages",
        ),
        Match(f"{_STEP}; torch's tuned, ours by messages", "torch tuned", "farstep, messages"),
    ],
    weighed=(
        "all-reduce, torch",
        "all-reduce, torch tuned",
        "reducing, farstep",
        "reducing, farstep, messages",
    ),
)
FSDP2 = [
    Contest(
        f"fsdp2-{2 * layers}",
        f"fsdp2-{layers}",
        2,
        [
            Match(
                f"{FSDP_STEPS} steps on {2 * layers} FSDP2 parameters, {layers * width**2 / 1e6:.1f} million elements; torch's fused AdamW",
                "torch",
                "farstep",
                1.0,
            )
        ],
    )
    for layers, width in FSDP_SIZES
]
GATHERING = [
    Contest(
        f"state{ranks}",
        "state-large",
        ranks,
        [
            Match(
                f"{ranks} ranks, {LARGE // 1_000_000} million parameters in 48 tensors",
                "torch",
                "farstep",
                target,
            )
        ],
        weighed=("torch", "farstep"),
        fresh_bytes=_FRESH_BYTES,
    )
    for ranks, target in ((2, 5.0), (4, 8.0))
]
GROWTH = [
    *(
        Contest(
            f"state-ranks{n}",
            "state-24",
            n,
            [Match(f"{n} ranks, 48 tensors", "torch", "farstep")],
            most_rounds=3,
            fresh_bytes=_FRESH_BYTES,
        )
        for n in (2, 4, 8)
    ),
    *(
        Contest(
            f"state-tensors{2 * n}",
            f"state-{n}",
            2,
            [Match(f"2 ranks, {2 * n} tensors", "torch", "farstep")],
            most_rounds=3,
            fresh_bytes=_FRESH_BYTES,
        )
        for n in (8, 96, 384)
    ),
]
STATES = [*GATHERING, *GROWTH]
BY_NAME = [
    Contest(
        f"{subject.key}-{ranks}",
        subject.key,
        ranks,
        [Match(f"{subject.title}, {ranks} rank{'s' * (ranks > 1)}", "torch", "farstep", target)],
        most_rounds=5,
        weighed=("torch", "farstep") if ranks == 4 else (),
        fresh_bytes=_FRESH_BYTES if ranks > 1 else 0,
    )
    for subject in optim_state.SUBJECTS
    for ranks, target in subject.targets.items()
]
_SAVED = "{size}, {place}, {ranks}: durable save; {other}"
_LOADED = "{size}, {place}, {ranks}: load, verified; {other}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _checkpoint(
    act: str, text: str, size: str, place: str, ranks: int, targets: dict[str, float | None]
) -> Contest:
    is_small = size == "1 GB"
    return Contest(
        f"{act}-{size.replace(' ', '')}-{place}-{ranks}",
        f"{act}-{size.replace(' ', '')}-{place}",
        ranks,
        [
            Match(
                text.format(size=size, place=place, ranks=_ranks(ranks), other=other),
                other,
                "farstep",
                target,
            )
            for other, target in targets.items()
            if is_small or other != "torch.save"
        ],
        most_rounds=5 if is_small else 3,
        warm_up=is_small,
        fresh_bytes=(1 << 29) if act == "load" else (5 if is_small else 20) << 28,
        weighed=("DCP", "farstep") if act == "load" and size == "1 GB" and place == "tmpfs" else (),
    )


def _moved(act: str, ranks: int, place: str, title: str, targets: dict[str, float | None]) -> Contest:
    matches = [
        Match(f"1 GB, {place}: {title}; {other}", other, "farstep", target)
        for other, target in targets.items()
    ]
    weighed = (
        [w for w in (*targets, "farstep") if w != "memcpy"] if act == "stall" and place == "tmpfs" else []
    )
    return Contest(
        f"{act}-{place}-{ranks}", f"{act}-{place}", ranks, matches, 4, weighed, fresh_bytes=5 << 28
    )


_SMALL = f"{checkpoints.SMALL_TENSORS:,} tensors of {checkpoints.SMALL_NUMEL} elements, tmpfs, 1 rank"
SMALL = [
    Contest(
        f"small-{act}",
        f"small-{act}",
        1,
        [Match(f"{_SMALL}: {title}; DCP", "DCP", "farstep")],
        most_rounds=1,
        warm_up=False,
    )
    for act, title in (
        ("save", "durable save"),
        ("open", "which tensors there are"),
        ("load", "load, verified"),
    )
]
BOXES = Contest(
    "boxes",
    "boxes",
    1,
    [],
    most_rounds=1,
    warm_up=False,
    alone=(
        checkpoints.BOXES_SAVED,
        checkpoints.BOXES_OPENED,
        checkpoints.BOXES_LOADED,
        checkpoints.BOXES_WHOLE,
    ),
)
CHECKPOINTS = [
    *(
        _checkpoint(
            "save",
            _SAVED,
            size,
            place,
            n,
            {"DCP": 2.0 if n == 1 else 2.5, "safetensors": 1.0, "torch.save": None, "raw": None},
        )
        for size in checkpoints.SIZES
        for place in checkpoints.PLACES
        for n in (1, 2, 4)
    ),
    *(
        _checkpoint(
            "load",
            _LOADED,
            size,
            place,
            n,
            {"DCP": 4.0, "safetensors": None, "torch.save": None, "raw": None},
        )
        for size in checkpoints.SIZES
        for place in checkpoints.PLACES
        for n in (1, 2, 4)
    ),
    *(
        contest
        for place in checkpoints.PLACES
        for contest in (
            _moved("reshard", 4, place, "what 2 ranks saved, on 4", {"DCP": 6.0}),
            _moved("whole", 2, place, "what 2 ranks saved, whole on each", {"DCP": 3.0}),
            _moved(
                "stall",
                2,
                place,
                "what a training waits for a save in the background, 2 ranks",
                {"DCP": 3.0, "DCP, stager reused": 1.5, "memcpy": None},
            ),
        )
    ),
    *SMALL,
    BOXES,
]
CONTESTS = [ZERO, *FSDP2, *STATES, *BY_NAME]


def report(contests: Sequence[Contest], outcomes: dict[str, Outcome]) -> list[str]:
    """Parts of RESULTS.md."""
    parts: list[str] = []
    steps = [c for c in contests if c in (ZERO, *FSDP2)]
    if steps:
        parts += [
            "## Sharded optimizers",
            "Two ranks in a gloo group on this machine, AdamW. `ShardedOptimizer` on a replicated model of 100 million parameters beside `ZeroRedundancyOptimizer`, whose best "
            "tuning is `fused=True, parameters_as_bucket_view=True`. torch's does not reduce gradients; in the rows that count that, it comes after an all-reduce of "
            "gradients that lie in flat buckets of 25 MiB, which is what `DistributedDataParallel` does. Ours are read from the memory of the other process, "
            "or sent in messages, which is what happens between hosts.",
            _table(steps, outcomes),
        ]
    if ZERO in steps and outcomes[ZERO.key].memory:
        parts += [
            "The most memory that a rank's process has had in two steps, from the first on:",
            _peaks(outcomes[ZERO.key]),
        ]
    states = [c for c in contests if c in STATES]
    if states:
        parts += [
            "## A full optimizer state on the first rank",
            "AdamW over an FSDP2 model, gathered whole into main memory: "
            "`state_dict(full=True, rank0_only=True, cpu_offload=True)` beside torch's "
            "`get_optimizer_state_dict` with `full_state_dict=True, cpu_offload=True`. More ranks than cores wait for each other.",
            _table([c for c in states if c in GATHERING], outcomes),
        ]
        weighed = [c for c in states if outcomes[c.key].memory]
        if weighed:
            parts += [
                "Memory beyond that which holds the result, at most, on the first rank and on the others:",
                _extra(weighed, outcomes),
            ]
        grown = [c for c in states if c in GROWTH]
        if grown:
            parts += [
                f"How it grows with ranks and with tensors, {MEDIUM // 1_000_000} million parameters:",
                _table(grown, outcomes),
            ]
    by_name = [c for c in contests if c in BY_NAME]
    if by_name:
        parts += [
            "## Optimizer state by parameter name",
            f"AdamW over a model of {optim_state.PARAMETERS / 1e6:.1f} million parameters: `farstep.fsdp` and `load_optim_state_dict` beside `get_optimizer_state_dict`, "
            "`set_optimizer_state_dict` and the functions of `FullyShardedDataParallel`, with flat parameters. Ours loads into new memory, so that a load that fails "
            "changes nothing.",
            _table(by_name, outcomes),
        ]
        weighed = [c for c in by_name if outcomes[c.key].memory]
        if weighed:
            parts += [
                "Memory that they take meanwhile, at most, on the first rank and on any other, the result included:",
                _growth(weighed, outcomes),
            ]
    saved = [c for c in contests if c in CHECKPOINTS]
    if saved:
        parts += [
            "## Checkpoints",
            "The state of a model and AdamW as DTensors cut over the ranks, 63 tensors. A save is durable: files and directory are synced, as DCP does by default, and as is done "
            "after `torch.save` and `safetensors.save_file`, which write each rank's part to a file of its own. A load goes into the state's own memory; of these only farstep's compares "
            "checksums. `raw` writes and reads the same bytes with nothing else. What was just written is read from the kernel's cache, by all alike.",
            _table([c for c in saved if c is not BOXES], outcomes).replace("| torch |", "| other |", 1),
        ]
        for act, what in (
            ("load", "Memory that a load takes beside the state, at most on any rank:"),
            ("stall", "Memory that two saves in the background take, beside half the state that a rank has:"),
        ):
            weighed = [c for c in saved if c.key.startswith(act) and outcomes[c.key].memory]
            if weighed:
                parts += [what, _beside(weighed, outcomes)]
        if SMALL[0] in saved and not outcomes[SMALL[0].key].failure:
            parts.append(_per_tensor(outcomes[SMALL[0].key]))
        if BOXES in saved:
            parts += ["A checkpoint of a million boxes, on one rank:", _boxes(outcomes[BOXES.key])]
    if parts:
        parts.append(_summary(contests, outcomes))
    return parts


def _table(contests: Sequence[Contest], outcomes: dict[str, Outcome]) -> str:
    lines = [
        ["", "torch", "farstep", "times faster", "min to max", "target", ""],
        ["---", *["---:"] * 5, "---"],
    ]
    for contest in contests:
        outcome = outcomes[contest.key]
        for match in contest.matches:
            if outcome.failure:
                lines.append(
                    [
                        match.title,
                        f"failed: {outcome.failure}",
                        "",
                        "",
                        "",
                        "",
                        "MISS" if match.target else "",
                    ]
                )
                continue
            one, two = outcome.seconds[match.baseline], outcome.seconds[match.subject]
            ratios = [a / b for a, b in zip(one, two, strict=True)]
            lines.append(
                [
                    match.title,
                    f"{statistics.median(one) * 1e3:.3g} ms",
                    f"{statistics.median(two) * 1e3:.3g} ms",
                    f"**{statistics.median(ratios):.2f}**",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                    "" if match.target is None else f"{match.target:g}",
                    verdict(match, outcome),
                ]
            )
    return _ruled(lines)


def verdict(match: Match, outcome: Outcome) -> str:
    if match.target is None:
        return ""
    if outcome.failure:
        return "MISS"
    pairs = zip(outcome.seconds[match.baseline], outcome.seconds[match.subject], strict=True)
    return "met" if statistics.median(a / b for a, b in pairs) >= match.target else "MISS"


def _peaks(outcome: Outcome) -> str:
    lines = [["", "most on any rank"], ["---", "---:"]]
    lines += [
        [way, f"{max(peak for _, peak in ranks) / 1e6:.0f} MB"] for way, ranks in outcome.memory.items()
    ]
    return _ruled(lines)


def _extra(contests: Sequence[Contest], outcomes: dict[str, Outcome]) -> str:
    result = 2 * 4 * LARGE
    lines = [
        ["", "torch, first", "torch, others", "farstep, first", "farstep, others"],
        ["---", *["---:"] * 4],
    ]
    for contest in contests:
        line = [contest.matches[0].title]
        for way in ("torch", "farstep"):
            grown = [peak - before for before, peak in outcomes[contest.key].memory[way]]
            line += [f"{max(0, grown[0] - result) / 1e6:.0f} MB", f"{max(grown[1:]) / 1e6:.0f} MB"]
        lines.append(line)
    return _ruled(lines)


def _beside(contests: Sequence[Contest], outcomes: dict[str, Outcome]) -> str:
    ways = list(outcomes[contests[0].key].memory)
    lines = [["", *ways], ["---", *["---:"] * len(ways)]]
    for contest in contests:
        memory = outcomes[contest.key].memory
        most = [max(peak - before for before, peak in memory[way]) for way in ways]
        lines.append(
            [contest.matches[0].title.rpartition(";")[0], *(f"{each / 1e6:.0f} MB" for each in most)]
        )
    return _ruled(lines)


def _per_tensor(outcome: Outcome) -> str:
    """What is stored beside the elements."""
    elements = checkpoints.SMALL_TENSORS * checkpoints.SMALL_NUMEL * 4
    told = ", ".join(
        f"{(nbytes - elements) / checkpoints.SMALL_TENSORS:.0f} by {way}"
        for way, nbytes in outcome.stored.items()
    )
    return f"Bytes on the disk for each of the {checkpoints.SMALL_TENSORS:,} tensors, beside its elements: {told}."


def _boxes(outcome: Outcome) -> str:
    if outcome.failure:
        return f"failed: {outcome.failure}"
    lines = [["", "farstep"], ["---", "---:"]]
    lines += [[way, f"{times[0]:.1f} s"] for way, times in outcome.seconds.items()]
    elements = checkpoints.SMALL_NUMEL * 4
    stored = outcome.stored[checkpoints.BOXES_SAVED] / 1e6
    lines.append(["bytes on the disk for each box, beside its elements", f"{stored - elements:.0f}"])
    return _ruled(lines)


def _growth(contests: Sequence[Contest], outcomes: dict[str, Outcome]) -> str:
    lines = [
        ["", "torch, first", "torch, others", "farstep, first", "farstep, others"],
        ["---", *["---:"] * 4],
    ]
    for contest in contests:
        line = [contest.matches[0].title]
        for way in ("torch", "farstep"):
            first, *others = (peak - before for before, peak in outcomes[contest.key].memory[way])
            line += [f"{each / 1e6:.0f} MB" for each in (first, max(others))]
        lines.append(line)
    return _ruled(lines)


def _summary(contests: Sequence[Contest], outcomes: dict[str, Outcome]) -> str:
    verdicts = [(match.title, verdict(match, outcomes[c.key])) for c in contests for match in c.matches]
    asked = [each for each in verdicts if each[1]]
    missed = [title for title, found in asked if found == "MISS"]
    words = (
        f"**Missed: {'; '.join(missed)}.**"
        if missed
        else f"All {len(asked)} targets of these tables are met."
    )
    return (
        f"{words} At most {max(c.most_rounds for c in contests)} rounds, 3 where growth is shown; in each, the ways are taken in a shuffled order by the same processes, with one compute thread each, and timed from when all ranks have begun "
        "until all are done. Right before each, memory is taken and given back, so that none pays for what the host of a virtual machine has taken back while it was free. Memory is measured in processes of their own."
    )


def _ruled(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
