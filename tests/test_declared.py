"""Settings: what a class declares by annotations, and what its objects do."""

import pickle
from copy import copy, deepcopy
from functools import cached_property
from inspect import signature
from typing import Annotated, Literal

import pytest

from steptime.base.config import Config, ConfigError, build
from steptime.base.core_schemas import AfterValidator, BeforeValidator, Field, model_validator
from steptime.base.units import Bytes


class Wheel(Config):
    spokes: int = Field(default=3, ge=1)


class Cart(Config):
    """A cart."""

    name: Annotated[str, AfterValidator(str.strip)]
    load: Bytes | None = Field(default=None, gt=0)
    kind: Literal["hand", "horse"] = "hand"
    wheels: list[Wheel] = Field(default_factory=list)
    axles: int = Field(default_factory=lambda data: len(data.get("wheels", [])) // 2)
    color: Annotated[str | None, BeforeValidator(lambda value: None if value == "none" else value)] = None

    @model_validator(mode="after")
    def _even(self) -> "Cart":
        if len(self.wheels) % 2:
            raise ConfigError("wheels: expected an even number")
        return self

    @cached_property
    def spokes(self) -> int:
        return sum(wheel.spokes for wheel in self.wheels)


TWO = [{"spokes": 4}, {}]


def test_values_are_read_as_declared():
    cart = Cart(name=" a ", load="2 kB", wheels=TWO, color="none")
    assert repr(cart) == (
        "Cart(name='a', load=2000.0, kind='hand', wheels=[Wheel(spokes=4), Wheel(spokes=3)], axles=1, color=None)"
    )
    assert str(cart.wheels[0]) == "spokes=4"
    assert cart.model_fields_set == {"name", "load", "wheels", "color"}
    assert build(Cart, cart) is cart


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"load": "0 B"}, "load: must be greater than 0 (got '0 B')"),
        ({"load": "-1 B"}, "load: must be at least 0 (got '-1 B')"),
        ({"load": float("inf")}, "load: expected a finite number (got inf)"),
        ({"load": "1 parsec"}, "load: unknown unit 'parsec': expected a quantity like '80 GiB' (got '1 parsec')"),
        ({"kind": "horsee"}, "kind: expected one of hand, horse (got 'horsee'); did you mean 'horse'?"),
        ({"wheels": [{"spokes": 0}]}, "wheels[0].spokes: must be at least 1 (got 0)"),
        ({"wheels": [{}]}, "wheels: expected an even number"),
        ({"wheel": []}, "wheel: unknown key (got a list of 0); did you mean 'wheels'?"),
    ],
)
def test_each_limit_has_its_line(said, line):
    with pytest.raises(ConfigError) as error:
        build(Cart, {"name": "a", **said})
    assert error.value.problems == [line]


def test_copies_are_equal_and_forget_what_was_computed():
    cart = Cart(name="a", wheels=TWO)
    assert (cart.spokes, vars(cart)["spokes"]) == (7, 7)
    wide = cart.model_copy(update={"wheels": []})
    assert (wide.spokes, cart.spokes) == (0, 7)
    for same in (copy(cart), deepcopy(cart), pickle.loads(pickle.dumps(cart)), cart.model_copy()):
        assert same == cart
        assert same.model_fields_set == {"name", "wheels"}
    assert cart != wide
    assert hash(Wheel(spokes=4)) == hash(cart.wheels[0])


def test_an_object_is_not_assigned_to():
    cart = Cart(name="a")
    for change in (lambda: setattr(cart, "name", "b"), lambda: delattr(cart, "name")):
        with pytest.raises(
            ConfigError, match=r"^Cart.name: cannot be assigned to; make a new one with Cart\(name=...\)$"
        ):
            change()
    with pytest.raises(TypeError, match=r"^Cart\(\) takes keywords only$"):
        Cart("a")
    with pytest.raises(AttributeError):
        _ = Cart.kind  # a default is no attribute of the class


def test_a_dump_leaves_out_what_is_chosen():
    cart = Cart(name="a", kind="hand", wheels=TWO)
    wheels = [{"spokes": 4}, {"spokes": 3}]
    rest = {"load": None, "kind": "hand", "axles": 1, "color": None}
    assert cart.model_dump() == {"name": "a", "wheels": wheels, **rest}
    assert cart.model_dump(exclude_unset=True) == {"name": "a", "kind": "hand", "wheels": TWO}
    assert cart.model_dump(exclude_defaults=True) == {"name": "a", "wheels": TWO, "axles": 1}
    assert cart.model_dump(exclude_none=True, exclude={"name", "axles"}) == {"kind": "hand", "wheels": wheels}
    assert cart.model_dump(include={"kind"}) == {"kind": "hand"}


def test_known_values_are_taken_as_they_are():
    cart = Cart.model_construct(name=3, wheels=[1, 2])
    assert (cart.name, cart.axles, cart.model_fields_set) == (3, 1, {"name", "wheels"})


def test_the_signature_names_the_fields():
    shown = str(signature(Cart)).replace("typing.", "")
    assert shown.startswith("(*, name: str, load: ")
    assert shown.endswith("= <factory>, axles: int = <factory>, color: str | None = None) -> None")
    assert str(signature(Wheel)).endswith("Field(ge=1)] = 3) -> None")


def test_a_class_extends_another():
    class Wagon(Cart):
        kind: Literal["horse", "ox"] = "ox"

    assert list(Wagon.model_fields) == list(Cart.model_fields)
    assert Wagon(name="a").kind == "ox"
    with pytest.raises(ConfigError, match="wheels: expected an even number"):
        Wagon(name="a", wheels=[{}])
