"""A Python module by its syntax: its functions and constants, and those that it imports from modules in its folder."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from typing import Self

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.call_arguments import imported, origin
from steptime.launch.python.config_values import constants_of, parsed

DEEPEST = 20
"""Calls, or imports, inside one another that are followed."""


class PythonModule(ABC):
    """The functions, constants and imports of one module."""

    def __init__(self, path: str, module: ast.Module, nearby: NearbyFiles) -> None:
        self.path, self.nearby, self.others = path, nearby, dict[str, Self | None]()
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.constants, self.imports = constants_of(module), imported(module)

    @abstractmethod
    def of_file(self, path: str, module: ast.Module) -> Self:
        """The same for another module."""

    def owner(self, name: str, depth: int = 0) -> tuple[Self, str] | None:
        """The module behind a name, its own or an adjacent one, and the name inside that module."""
        if name in self.functions or name in self.constants:
            return self, name
        if (found := origin(name, self.imports)) is None or depth > DEEPEST:
            return None
        file, own = found
        if file not in self.others:
            text = self.nearby.text(file)
            self.others[file] = None
            if text is not None:
                self.others[file] = read = self.of_file(file, parsed(file, text))
                read.others = self.others  # each file once
        other = self.others[file]
        return other.owner(own, depth + 1) if other is not None else None

    def find(self, name: str) -> tuple[Self, ast.FunctionDef] | None:
        """A function by the name that this module uses for it."""
        found = self.owner(name)
        return (found[0], found[0].functions[found[1]]) if found and found[1] in found[0].functions else None
