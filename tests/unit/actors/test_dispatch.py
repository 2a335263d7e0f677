from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar, assert_never

import pytest

from ratchet.actors.actor import Actor, Answer
from ratchet.messages import Message


class A(Message, frozen=True):
    pass


class B(Message, frozen=True):
    pass


class C(Message, frozen=True):
    pass


M = TypeVar("M")
N = TypeVar("N")
Both: TypeAlias = A | B


def test_a_class_that_forgets_a_message_cannot_be_defined() -> None:
    with pytest.raises(TypeError, match=r"^Forgetful\.receive does not handle B, C: add a case"):

        class Forgetful(Actor[A | B | C]):
            def receive(self, message: A | B | C) -> Answer:
                match message:
                    case A():
                        pass
                return None


def test_one_that_handles_all_can() -> None:
    class Complete(Actor[A | B]):
        def receive(self, message: A | B) -> Answer:
            match message:
                case A() | B():
                    return None
                case _:
                    assert_never(message)

    assert Complete._accepts == {A, B}


def test_aliases_and_names_as_strings_are_resolved() -> None:
    class Alias(Actor[Both | C]):
        def receive(self, message: Both | C) -> Answer:
            match message:
                case A() | B() | C():
                    return None

    class Text(Actor["Both | C"]):
        def receive(self, message: Both | C) -> Answer:
            match message:
                case A() | B() | C():
                    return None

    assert Alias._accepts == Text._accepts == {A, B, C}
    with pytest.raises(TypeError, match="does not handle B, C"):

        class Short(Actor["Both | C"]):
            def receive(self, message: Both | C) -> Answer:
                match message:
                    case A():
                        return None
                return None


def test_a_generic_base_adds_its_own_messages() -> None:
    class Role(Actor[M | C], Generic[M]):
        pass

    class Two(Actor[N], Generic[M, N]):
        pass

    with pytest.raises(TypeError, match="does not handle C"):

        class Bad(Role[A | B]):
            def receive(self, message: A | B | C) -> Answer:
                match message:
                    case A() | B():
                        return None
                return None

    class Good(Role[A]):
        def receive(self, message: A | C) -> Answer:
            match message:
                case A() | C():
                    return None

    class Second(Two[A, B]):
        def receive(self, message: B) -> Answer:
            match message:
                case B():
                    return None

    assert Role._accepts is None
    assert Good._accepts == {A, C}
    assert Second._accepts == {B}


def test_a_subclass_may_add_to_receive_and_may_not_take_away() -> None:
    class Base(Actor[A | B]):
        def receive(self, message: A | B) -> Answer:
            match message:
                case A() | B():
                    return None

    class More(Base):
        def receive(self, message: A | B) -> Answer:
            if isinstance(message, A):
                return None
            return super().receive(message)

    assert More._accepts == {A, B}
    with pytest.raises(TypeError, match=r"Less\.receive does not handle B"):

        class Less(Base):
            def receive(self, message: A | B) -> Answer:
                match message:
                    case A():
                        return None
                return None


def test_what_is_not_a_message_class_is_refused() -> None:
    with pytest.raises(TypeError, match="is not a message class or a union"):

        class Wrong(Actor[list[int]]):
            def receive(self, message: list[int]) -> Answer:
                return None


def test_an_abstract_class_with_a_union_is_checked_when_receive_is_written() -> None:
    class Abstract(Actor[A | B]):
        pass

    with pytest.raises(TypeError, match="does not handle B"):

        class Concrete(Abstract):
            def receive(self, message: A | B) -> Answer:
                match message:
                    case A():
                        return None
                return None
