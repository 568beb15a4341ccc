"""Sections inside another whose classes are built when the first value for them arrives, not with the outer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Later:
    """The schema of such a section."""

    def __get_pydantic_core_schema__(self, source: type[BaseModel], _handler: GetCoreSchemaHandler) -> CoreSchema:
        def json_schema(_found: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
            source.model_rebuild()
            name = f"{source.__module__}.{source.__qualname__}:{id(source)}"  # pydantic's form of a reference
            whole: Any = {**source.__pydantic_core_schema__, "ref": name}
            return handler(core_schema.no_info_after_validator_function(source.model_validate, whole))

        return core_schema.no_info_plain_validator_function(
            source.model_validate,
            metadata={"pydantic_js_annotation_functions": [json_schema]},
            serialization=core_schema.wrap_serializer_function_ser_schema(dumped),
        )


def dumped(value: Any, dump: Callable[[Any], Any]) -> Any:
    """A section as plain data. A default is made without validation, and pydantic 2.13 dumps none of a class not yet built."""
    type(value).model_rebuild()
    return dump(value)
