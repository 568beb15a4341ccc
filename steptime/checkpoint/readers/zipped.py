"""What a zip archive holds decides who reads it: torch, TorchScript, a torch.export .pt2, or numpy .npz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.checkpoint import zipdir
from steptime.checkpoint.readers import hdf5, npy, pt2, torch_file

if TYPE_CHECKING:
    from steptime.checkpoint.records import Contents
    from steptime.checkpoint.source import Source


def read(source: Source) -> Contents:
    """Any zip archive a framework writes. Raises `UnreadableError`."""
    directory = zipdir.read_directory(source)
    if directory is None:
        return torch_file.salvage(source)
    names = directory.entries
    if not any(name.endswith("data.pkl") for name in names):
        if any(name.endswith("model_weights_config.json") for name in names):
            return pt2.read(source, directory)
        if hdf5.KERAS in names:
            return hdf5.read_keras(source, names[hdf5.KERAS])
        if any(name.endswith(".npy") for name in names):
            return npy.read_npz(source, directory)
    return torch_file.read_zip(source, directory)
