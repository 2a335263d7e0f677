from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks.answered import AnsweredTask
from ratchet.tasks.jsonl import build_jsonl
from ratchet.tasks.problems import problem_id
from ratchet.types import Prompt


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def build(args: dict[str, object], *, needs_answers: bool = True) -> AnsweredTask:
    task = build_jsonl(args, needs_answers=needs_answers)
    task.prompts("train")  # what reads the file
    return task


def test_lines_become_prompts_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        '{"prompt": "2+2=", "answer": "4", "id": "a", "metadata": {"level": 1}}',
        "",
        '{"prompt": "3+3=", "answer": "6"}',
    )
    first, second = build({"path": path}).prompts("train")
    assert (first.prompt_id, first.text, first.reference) == ("a", "2+2=", "4")
    assert first.metadata == {"level": 1}
    assert second.prompt_id == problem_id("3+3=")
    assert build({"path": path}).prompts("eval") == ()


@pytest.mark.parametrize(
    ("completion", "reward"), [("4", 1.0), (" 4\n", 1.0), ("44", 0.0), ("", 0.0), ("4 .", 0.0)]
)
def test_a_completion_is_right_if_it_is_the_answer(
    tmp_path: Path, completion: str, reward: float
) -> None:
    task = build({"path": write(tmp_path / "d.jsonl", '{"prompt": "2+2=", "answer": "4"}')})
    assert task.score(task.prompts("train")[0], completion) == reward


def test_without_an_answer_the_score_fails_instead_of_being_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"prompt": "Write a poem."}')
    task = build({"path": path}, needs_answers=False)
    with pytest.raises(RewardFailed, match="no answer"):
        task.score(task.prompts("train")[0], "roses")


def test_a_problem_asked_twice_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    lines = [
        f'{{"prompt": "{number % 20}", "answer": "x", "id": "{number}"}}' for number in range(60)
    ]
    task = build({"path": write(tmp_path / "d.jsonl", *lines), "holdout": 5})
    held_out = {prompt.text for prompt in task.prompts("eval")}
    assert len(held_out) == 5
    assert len(task.prompts("eval")) == 15
    assert held_out.isdisjoint(prompt.text for prompt in task.prompts("train"))


def test_a_second_file_is_held_out_whole(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", '{"prompt": "a", "answer": "1"}')
    held_out = write(tmp_path / "e.jsonl", '{"prompt": "b", "answer": "2"}')
    task = build({"path": train, "eval_path": held_out})
    assert [prompt.text for prompt in task.prompts("train")] == ["a"]
    assert [prompt.text for prompt in task.prompts("eval")] == ["b"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"prompt": "a", "answer": "1"}', "{oops"], r"d\.jsonl:2: .*malformed"),
        (['{"answer": "1"}'], r"d\.jsonl:1: .*missing required field `prompt`"),
        (['{"prompt": "a", "anwser": "1"}'], r"d\.jsonl:1: .*unknown field `anwser`"),
        (
            ['{"prompt": "a", "answer": 1}'],
            r"d\.jsonl:1: Expected `str \| null`, got `int`.*answer",
        ),
        (['{"prompt": "a"}'], r'd\.jsonl:1: "answer" is missing; .*task\.reward'),
        (
            [
                '{"prompt": "a", "answer": "1", "id": "x"}',
                '{"prompt": "b", "answer": "1", "id": "x"}',
            ],
            r"d\.jsonl:2: the id 'x' is already taken by .*d\.jsonl:1",
        ),
        (
            ['{"prompt": "a", "answer": "1"}', "", '{"prompt": "a", "answer": "1"}'],
            r"d\.jsonl:3: .*already taken by .*d\.jsonl:1 .*the same prompt",
        ),
        ([""], r"task\.args\.path: there are no lines"),
    ],
)
def test_bad_data_names_file_and_line(tmp_path: Path, lines: list[str], words: str) -> None:
    path = write(tmp_path / "d.jsonl", *lines)
    with pytest.raises(TaskError, match=words):
        build({"path": path})


def test_bytes_that_are_no_text_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(TaskError, match=r"d\.jsonl:1: "):
        build({"path": str(tmp_path / "d.jsonl")})


def test_wrong_arguments_name_field_value_and_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"prompt": "a", "answer": "1"}')
    with pytest.raises(TaskError, match=r"task\.args\.path is missing"):
        build({})
    with pytest.raises(TaskError, match=r"unknown key task\.args\.file; known here: .*path"):
        build({"path": path, "file": path})
    missing = str(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match=r"task\.args\.path = .*none\.jsonl.*No such file"):
        build({"path": missing})
    with pytest.raises(TaskError, match=r"task\.args\.eval_path = .*none\.jsonl.*No such file"):
        build({"path": path, "eval_path": missing})
    with pytest.raises(TaskError, match=r"holdout = 1 leaves nothing to train on"):
        build({"path": path, "holdout": 1})
    with pytest.raises(TaskError, match="both say what is held out"):
        build({"path": path, "eval_path": path, "holdout": 1})


def test_a_held_out_problem_that_is_also_trained_on_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", '{"prompt": "a", "answer": "1", "id": "x"}')
    held_out = write(tmp_path / "e.jsonl", '{"prompt": "a", "answer": "1", "id": "y"}')
    with pytest.raises(TaskError, match=r"'a' is at .*t\.jsonl:1 and at .*e\.jsonl:1; held"):
        build({"path": train, "eval_path": held_out})


def test_who_only_scores_never_reads_the_file(tmp_path: Path) -> None:
    task = build_jsonl({"path": str(tmp_path / "none.jsonl")}, needs_answers=True)
    assert task.score(Prompt("a", "2+2=", "4"), "4") == 1.0


def test_answers_may_be_compared_as_mathematics(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"prompt": "1/4+1/4", "answer": "1/2"}')
    task = build({"path": path, "score": "math"})
    assert task.score(task.prompts("train")[0], r"so \boxed{\frac{2}{4}}") == 1.0
    with pytest.raises(TaskError, match=r"task\.args\.score = 'maths': .*'exact' or 'math'"):
        build({"path": path, "score": "maths"})
