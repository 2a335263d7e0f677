"""What the adapter uses of verifiers 0.3: environments, rubrics, and how they load; and what an
environment uses of datasets.
"""

from __future__ import annotations

import abc
import copy
import importlib
import inspect
import signal
import uuid
from collections.abc import Callable, Sequence
from typing import Any


class Dataset(list[dict[str, Any]]):
    @classmethod
    def from_list(cls, rows: Sequence[dict[str, Any]]) -> Dataset:
        return cls(copy.deepcopy(list(rows)))


class Client(abc.ABC):
    def __init__(self, client: Any) -> None:
        self.client = client

    @abc.abstractmethod
    async def get_response(self, *args: Any) -> Any: ...


class AssistantMessage(dict[str, Any]):
    def __init__(self, content: str) -> None:
        super().__init__(role="assistant", content=content)


def stop(condition: Callable[..., Any]) -> Callable[..., Any]:
    condition.is_stop = True  # type: ignore[attr-defined]
    return condition


class Rubric:
    """As there, a function that raises scores 0, and one of `completions` is of a whole group."""

    def __init__(self, funcs: Sequence[Callable[..., Any]], weights: Sequence[float]) -> None:
        self.funcs = list(funcs)
        self.weights = list(weights)

    @property
    def has_group_rewards(self) -> bool:
        return any("completions" in inspect.signature(f).parameters for f in self.funcs)

    async def score_rollout(self, state: dict[str, Any]) -> None:
        scores = [await self._call(function, state) for function in self.funcs]
        state["reward"] = sum(s * w for s, w in zip(scores, self.weights, strict=True))

    async def cleanup(self, state: dict[str, Any]) -> None: ...

    @staticmethod
    async def _call(function: Callable[..., Any], state: dict[str, Any]) -> float:
        given = {name: state[name] for name in ("prompt", "completion", "answer", "info")}
        wanted = inspect.signature(function).parameters
        if not any(each.kind == each.VAR_KEYWORD for each in wanted.values()):
            given = {name: value for name, value in given.items() if name in wanted}
        try:
            result = function(**given)
            return float(await result if inspect.isawaitable(result) else result)
        except Exception:  # noqa: BLE001 - as the library does
            return 0.0


class MultiTurnEnv:
    tool_defs: Any = None

    def __init__(
        self,
        *,
        dataset: Dataset,
        rubric: Rubric,
        eval_dataset: Dataset | None = None,
        system_prompt: str | None = None,
        max_turns: int = -1,
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the library takes signals for itself
        self.rubric = rubric
        self.max_turns = max_turns
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._datasets = {"train": dataset, "eval": eval_dataset}

    def _build(self, split: str) -> Dataset | None:
        rows = self._datasets[split]
        if rows is None:
            return None
        return Dataset(
            {**row, "prompt": [*self._system, {"role": "user", "content": row["question"]}]}
            for row in rows
        )

    def build_dataset(self) -> Dataset | None:
        return self._build("train")

    def build_eval_dataset(self) -> Dataset | None:
        return self._build("eval")

    async def init_state(self, row: dict[str, Any], client: Client, model: str) -> dict[str, Any]:
        row = copy.deepcopy(row)
        return row | {"trajectory": [], "trajectory_id": uuid.uuid4().hex, "completion": None}

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def get_prompt_messages(self, state: dict[str, Any]) -> list[Any]:
        if not state["trajectory"]:
            return list(state["prompt"])
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    async def add_trajectory_step(self, state: dict[str, Any], step: dict[str, Any]) -> None:
        state["trajectory"].append(step)

    async def is_completed(self, state: dict[str, Any]) -> bool:
        if 0 < self.max_turns <= len(state["trajectory"]):
            return True
        if state.get("final_env_response") is not None:
            return True
        stops = [n for n, f in vars(type(self)).items() if hasattr(f, "is_stop")]
        return any([await getattr(self, name)(state) for name in stops])

    async def cleanup(self, state: dict[str, Any]) -> None:
        last = state["trajectory"][-1]
        said = [*last["prompt"], *last["completion"], *(state.get("final_env_response") or ())]
        state["completion"] = said[len(state["prompt"]) :]


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_turns=1, **kwargs)


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools: list[Any], **kwargs: Any) -> None:
        del tools
        super().__init__(**kwargs)


def load_environment(name: str, **args: Any) -> MultiTurnEnv:
    try:
        module = importlib.import_module(name.replace("-", "_"))
    except ImportError as error:
        msg = f"Could not import '{name}' environment"
        raise ValueError(msg) from error
    try:
        made: MultiTurnEnv = module.load_environment(**args)
    except Exception as error:
        msg = f"Failed to load environment '{name}': {error}"
        raise RuntimeError(msg) from error
    return made
