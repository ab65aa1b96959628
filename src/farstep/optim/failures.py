"""What went wrong on the owners, as one exception for the caller."""

from __future__ import annotations

from farstep.errors import RpcTimeout, StepError
from farstep.optim.owners import Outcome

__all__ = ["named_error", "step_error"]


def named_error(outcome: Outcome, what: str) -> Exception:
    """The first owner's own exception, with a note of who it was, and of who else failed, and how."""
    error = outcome.first_error()
    assert error is not None
    for owner, each in outcome.errors.items():
        is_the_same = type(each) is type(error) and str(each) == str(error)
        error.add_note(
            f"worker {owner.name!r} {what}" + ("" if is_the_same else f": {type(each).__name__}: {each}")
        )
    return error


def step_error(outcome: Outcome) -> StepError:
    failed: dict[str, BaseException] = {owner.name: error for owner, error in outcome.errors.items()}
    stepped = [owner.name for owner in outcome.results]
    told = "; ".join(
        f"worker {name!r}: {type(error).__name__}: {error}"
        + (" (no answer in time: it may have stepped all the same)" if isinstance(error, RpcTimeout) else "")
        for name, error in failed.items()
    )
    done = f"{', '.join(stepped)} did step" if stepped else "no owner has stepped"
    text = (
        f"the step failed on {len(failed)} of {len(failed) + len(stepped)} owners, and {done}. {told}. To have all owners at the same step "
        f"again, load a state and weights that were saved before (load_state_dict); to go on without the failed ones, make a new "
        f"DistributedOptimizer"
    )
    error = StepError(text, failed, stepped)
    error.__cause__ = outcome.first_error()
    return error
