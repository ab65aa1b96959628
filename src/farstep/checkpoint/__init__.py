"""Checkpoints: state that is whole or absent, verified, and loads on any number of ranks."""

from farstep.checkpoint.async_save import async_save
from farstep.checkpoint.convert import FORMATS, Converted, convert, save_dcp
from farstep.checkpoint.handle import SaveHandle, SaveProgress
from farstep.checkpoint.loading import load, read
from farstep.checkpoint.local_disk import LocalDisk
from farstep.checkpoint.manager import CheckpointManager, Resumed
from farstep.checkpoint.optimizers import load_optimizer
from farstep.checkpoint.remote import RemoteStorage
from farstep.checkpoint.report import Report
from farstep.checkpoint.saving import save
from farstep.checkpoint.sharded_optimizers import load_sharded_optimizer_state_dict
from farstep.checkpoint.staging import release_staging
from farstep.checkpoint.storage import NewFile, Storage, StoredFile
from farstep.checkpoint.tree import PerRank

__all__ = [
    "FORMATS",
    "CheckpointManager",
    "Converted",
    "LocalDisk",
    "NewFile",
    "PerRank",
    "RemoteStorage",
    "Report",
    "Resumed",
    "SaveHandle",
    "SaveProgress",
    "Storage",
    "StoredFile",
    "async_save",
    "convert",
    "load",
    "load_optimizer",
    "load_sharded_optimizer_state_dict",
    "read",
    "release_staging",
    "save",
    "save_dcp",
]
