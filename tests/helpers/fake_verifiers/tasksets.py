"""What the adapter uses of verifiers.v1 0.4: tasksets, their tasks, traces, and how they load."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

DataT = TypeVar("DataT")
TaskT = TypeVar("TaskT")
ConfigT = TypeVar("ConfigT")


class UserMessage(BaseModel):
    role: str = "user"
    content: str


class SystemMessage(BaseModel):
    role: str = "system"
    content: str


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str


class TaskData(BaseModel):
    idx: int | None = None
    prompt: str | list[UserMessage] | None = None
    system_prompt: str | None = None


class TaskConfig(BaseModel):
    pass


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = ""
    task: TaskConfig = TaskConfig()


class State(BaseModel):
    pass


def state_cls(kind: type) -> type[State]:
    del kind
    return State


class MessageNode(BaseModel):
    parent: int | None = None
    message: Any
    sampled: bool = False


class TraceTask(BaseModel):
    type: str
    data: Any
    key: str | None = None
    hash: str | None = None


class AgentConfig(BaseModel):
    pass


class AgentInfo(BaseModel):
    config: AgentConfig


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    state: State
    nodes: list[MessageNode] = Field(default_factory=list)
    ok: bool = False
    is_completed: bool = False
    rewards: dict[str, tuple[float, float]] = Field(default_factory=dict)

    @property
    def messages(self) -> list[Any]:
        """Of the path that ends in the last node."""
        path, at = [], len(self.nodes) - 1 if self.nodes else None
        while at is not None:
            path.append(self.nodes[at].message)
            at = self.nodes[at].parent
        return path[::-1]

    @property
    def last_reply(self) -> str:
        said = [node.message.content for node in self.nodes if node.sampled]
        return str(said[-1]).strip() if said else ""

    @property
    def reward(self) -> float:
        return sum(score * weight for score, weight in self.rewards.values())


def reward(function: Any = None, weight: float = 1.0) -> Any:
    def mark(marked: Any) -> Any:
        marked.reward, marked.weight = True, weight
        return marked

    return mark if function is None else mark(function)


class TaskError(Exception):
    pass


class Task(Generic[DataT]):
    NEEDS_CONTAINER: ClassVar[bool] = False

    def __init__(self, data: Any, config: TaskConfig | None = None) -> None:
        self.data = data
        self.config = config or TaskConfig()
        self.key = self.hash = repr(data)

    async def setup(self, trace: Trace, runtime: Any) -> None: ...

    async def finalize(self, trace: Trace, runtime: Any) -> None: ...

    @classmethod
    def toolsets(cls, config: TaskConfig) -> list[Any]:
        return []

    def plugged_judges(self) -> list[Any]:
        return []

    def hooks(self, attr: str) -> list[Callable[..., Any]]:
        names = {
            n for kind in type(self).__mro__ for n, f in vars(kind).items() if hasattr(f, attr)
        }
        return [getattr(self, name) for name in sorted(names)]

    async def score(self, trace: Trace, runtime: Any = None) -> None:
        given = {"task": self.data, "trace": trace}
        for function in self.hooks("reward"):
            wanted = inspect.signature(function).parameters
            if "runtime" in wanted:  # skipped without one
                continue
            try:
                score = await function(**{name: given[name] for name in wanted})
            except Exception as error:
                msg = f"task {type(self).__name__} scoring: {type(error).__name__}: {error}"
                raise TaskError(msg) from error
            trace.rewards[function.__name__] = (float(score), vars(function.__func__)["weight"])


class Taskset(Generic[TaskT, ConfigT]):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def bounded(self) -> bool:
        return not self.INFINITE

    def __iter__(self) -> Iterator[Any]:
        for index, task in enumerate(self.load()):
            task.data = task.data.model_copy(update={"idx": index})
            yield task

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


class Env:
    pass


class SingleAgentEnv(Env):
    pass


def _exported(name: str, base: type) -> Any:
    module_name = name.replace("-", "_")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        msg = f"taskset {name!r} not found (tried to import {module_name!r})"
        raise ModuleNotFoundError(msg) from error
    exported = [getattr(module, each) for each in module.__all__]
    return next((kind for kind in exported if issubclass(kind, base)), None)


def taskset_config_type(name: str) -> Any:
    (base,) = _exported(name, Taskset).__orig_bases__
    return get_args(base)[1]


def load_taskset(config: Any) -> Any:
    return _exported(config.id, Taskset)(config)


def environment_class(name: str) -> Any:
    return _exported(name, Env) or SingleAgentEnv


def default_harness_id(name: str) -> str:
    return "bash"
