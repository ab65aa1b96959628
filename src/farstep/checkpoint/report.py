"""What a load has left as it was."""

from __future__ import annotations

from dataclasses import dataclass, field

from farstep.checkpoint.listing import listed, named

__all__ = ["Report"]


@dataclass
class Report:
    """What a load has left as it was: with `strict`, at most `unsaved`."""

    missing: list[str] = field(default_factory=list)
    """In the state, and not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, and not in the state: also pieces of an optimizer's state, and options of
    its groups, that this optimizer does not take.
    """
    reshaped: list[str] = field(default_factory=list)
    """In both, with different shapes, or a tensor in one and none in the other."""
    unsaved: list[str] = field(default_factory=list)
    """What this rank has for itself (`PerRank`), and no rank of its number has saved: there were fewer then."""
    meta: list[str] = field(default_factory=list)
    """Tensors that are still on the meta device: the checkpoint has nothing for them, as for buffers that are not persistent."""
    differences: dict[str, str] = field(default_factory=dict)
    """Of each name in `reshaped`, what it is in the state and in the checkpoint."""

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.missing or self.unexpected or self.reshaped or self.unsaved or self.meta)

    def __str__(self) -> str:
        if not self:
            return "everything was loaded"
        return "; ".join(
            f"{what}: {found}"
            for what, found in (
                ("missing in the checkpoint", named(self.missing)),
                ("not in the state", named(self.unexpected)),
                ("of another shape", self.shapes),
                ("of this rank, which has saved nothing", named(self.unsaved)),
                ("still on the meta device", named(self.meta)),
            )
            if found
        )

    @property
    def shapes(self) -> str:
        """`reshaped` in words."""
        return listed([f"{name!r} {self.differences.get(name, '')}".strip() for name in self.reshaped])
