"""torch's rendezvous stores, under one roof: torch exports them without saying so to type checkers."""

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "rendezvous"]
