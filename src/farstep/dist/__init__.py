"""Small tools over torch process groups, for everything that talks to other ranks.

Every public operation that several ranks call together runs inside `operation("its name")`, and every
blocking call of it inside `waiting(group, "what for")`. A wait that takes too long, or that fails because
another rank is gone, raises `RankLost`, which names the ranks that died, stayed away, or called something
else. See [Note: who is absent] in watcher.py.
"""

from farstep.dist.operations import current_operation, operation, waiting
from farstep.dist.options import rank_timeout_s

__all__ = ["current_operation", "operation", "rank_timeout_s", "waiting"]
