"""What a person sees of `farstep checkpoint diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from farstep.checkpoint.dtypes import name_of
from farstep.checkpoint.manifest import TensorInfo
from farstep.checkpoint.tools.comparing import Diff, TensorDiff, ValueDiff
from farstep.checkpoint.tools.screens import plain_table
from farstep.checkpoint.tools.units import count, printable, shape_text, short

__all__ = ["diff_screen"]

_VALUE_LETTERS = 40


def diff_screen(found: Diff, a: str, b: str, limit: int) -> RenderableType:
    """Of each kind of difference the `limit` largest, or all if that is 0."""
    parts: list[RenderableType] = [Text(f"A  {printable(a)}\nB  {printable(b)}", style="bold"), Text()]
    by_status: dict[str, list[TensorDiff]] = {}
    for each in found.tensors:
        by_status.setdefault(each.status, []).append(each)
    for title, status, told in (
        ("only in A", "only_a", lambda each: _info(each.a)),
        ("only in B", "only_b", lambda each: _info(each.b)),
        ("of different shapes", "shape", lambda each: f"{_info(each.a)}  →  {_info(each.b)}"),
    ):
        parts += _listed(title, by_status.get(status, []), limit, told)
    parts += _numbers("of different dtypes", by_status.get("dtype", []), limit)
    parts += _numbers("with different elements", by_status.get("different", []), limit)
    parts += _numbers("within the tolerance", by_status.get("close", []), limit)
    parts += _values(found.values, limit)
    parts.append(_summary(found, by_status))
    return Group(*parts)


def _summary(found: Diff, by_status: dict[str, list[TensorDiff]]) -> Text:
    same = [count(len(by_status.get("equal", [])), "tensor")]
    same[0] += f" and {count(found.equal_values, 'value')} are equal"
    if by_status.get("close"):
        same.append(f"{count(len(by_status['close']), 'tensor')} within the tolerance")
    if not found:
        return Text(f"no difference: {', '.join(same)}", style="green")
    unlike = sum(not each.is_same for each in found.tensors)
    differ = [count(unlike, "tensor")] if unlike else []
    differ += [count(len(found.values), "value")] if found.values else []
    return Text(f"{' and '.join(differ)} differ; {', '.join(same)}", style="bold red")


def _listed(
    title: str, found: Sequence[TensorDiff], limit: int, told: Callable[[TensorDiff], str]
) -> Iterator[RenderableType]:
    if not found:
        return
    yield Text(f"{count(len(found), 'tensor')} {title}", style="bold")
    table = plain_table("", "", "", left=(0, 1, 2))
    table.show_header = False
    for each in found[: limit or None]:
        table.add_row("", Text(printable(each.name), overflow="fold"), Text(told(each), style="dim"))
    yield table
    yield from _rest(found, limit)


def _numbers(title: str, found: Sequence[TensorDiff], limit: int) -> Iterator[RenderableType]:
    """Those that differ most, against their norm, come first."""
    if not found:
        return
    yield Text(f"{count(len(found), 'tensor')} {title}", style="bold")
    table = plain_table("", "name", "differ", "max |A-B|", "|A-B|", "|A|", "|B|", left=(0, 1))
    for each in sorted(found, key=_weight, reverse=True)[: limit or None]:
        name = Text(printable(each.name), overflow="fold")
        if each.status == "dtype" and each.a is not None and each.b is not None:
            name.append(f"  {name_of(each.a.dtype)} → {name_of(each.b.dtype)}", style="dim")
        sums = each.sums
        if sums is None:
            table.add_row("", name, "none", *("" for _ in range(4)))
            continue
        differ = f"{sums.different / max(1, sums.elements):.1%}" if sums.different > 9 else f"{sums.different}"  # fmt: skip
        differ += f" ({sums.nan:,} NaN)" if sums.nan else ""
        norms = (sums.norm_difference, sums.norm_a, sums.norm_b)
        table.add_row("", name, differ, _number(sums.largest), *map(_number, norms))
    yield table
    yield from _rest(found, limit)


def _weight(each: TensorDiff) -> tuple[int, float]:
    if each.sums is None:
        return 0, 0.0
    relative = each.sums.relative
    return each.sums.nan, relative if relative == relative else float("inf")


def _values(found: Sequence[ValueDiff], limit: int) -> Iterator[RenderableType]:
    if not found:
        return
    yield Text(f"{count(len(found), 'value')} {'differs' if len(found) == 1 else 'differ'}", style="bold")
    table = plain_table("", "", "", left=(0, 1, 2))
    table.show_header = False
    for each in found[: limit or None]:
        if each.status == "different":
            told = f"{_value(each.a)}  →  {_value(each.b)}"
        else:
            told = (
                f"{_value(each.a)}, only in A" if each.status == "only_a" else f"{_value(each.b)}, only in B"
            )
        table.add_row("", Text(printable(each.name), overflow="fold"), Text(told, style="cyan"))
    yield table
    yield from _rest(found, limit)


def _rest(found: Sequence[Any], limit: int) -> Iterator[RenderableType]:
    if limit and len(found) > limit:
        yield Text(f"  and {len(found) - limit:,} more; --limit 0 shows all", style="dim")
    yield Text()


def _value(value: Any) -> str:
    return short(repr(value), _VALUE_LETTERS)


def _info(info: TensorInfo | None) -> str:
    return "" if info is None else f"{name_of(info.dtype)} {shape_text(info.shape)}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) and value < 1e6 else f"{value:.4g}"
