from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.backends.models import (
    build_model,
    char_tokenizer,
    eos_token_ids,
    load_model,
    load_tokenizer,
    save_model_directory,
)
from ratchet.errors import ConfigError

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = char_tokenizer("0123456789+=")
    save_model_directory(build_model(QWEN3, 7, tokenizer), tokenizer, path)
    return path


def copy_of(directory: Path, target: Path) -> Path:
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_char_tokenizer_maps_each_character_to_one_token() -> None:
    tokenizer = char_tokenizer("ab \n=")
    assert tokenizer.encode("a b=\n?") == [3, 5, 4, 7, 6, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.decode([3, 5, 4, 7, 1, 0], skip_special_tokens=True) == "a b="


@pytest.mark.parametrize("chars", ["", "abca"])
def test_char_tokenizer_refuses_what_is_ambiguous(chars: str) -> None:
    with pytest.raises(ConfigError, match="tokenizer_chars"):
        char_tokenizer(chars)


def test_build_takes_vocabulary_from_the_tokenizer_and_weights_from_the_seed() -> None:
    tokenizer = char_tokenizer("abc")
    state = torch.random.get_rng_state()
    one, two, other = (build_model(QWEN3, seed, tokenizer) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.config.vocab_size == 6
    assert (one.config.pad_token_id, one.config.eos_token_id) == (0, 1)
    assert not one.training
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "qwen33"}, "model.build.model_type = 'qwen33'"),
        ({"hiden_size": 8}, "did you mean 'hidden_size'"),
        ({"vocab_size": 3}, "model.build.vocab_size = 3"),
        ({"hidden_size": "wide"}, "model.build"),
        ({"num_attention_heads": 0}, "model.build"),
    ],
)
def test_build_names_the_key_that_does_not_work(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_model({**QWEN3, **change}, 0, char_tokenizer("abc"))


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_build_takes_other_architectures_and_their_own_names(model_type: str) -> None:
    names = {"gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32}}
    config = names.get(model_type, {"hidden_size": 16, "num_attention_heads": 2})
    model = build_model(
        {"model_type": model_type, "num_hidden_layers": 1, **config}, 0, char_tokenizer("abc")
    )
    assert model.config.hidden_size == 16
    assert model.config.bos_token_id is None
    assert eos_token_ids(model, char_tokenizer("abc")) == {1}


def test_directory_round_trip_is_exact(directory: Path) -> None:
    model, tokenizer = load_model(directory, "float32"), load_tokenizer(directory)
    expected = build_model(QWEN3, 7, char_tokenizer("0123456789+=")).state_dict()
    assert not model.training
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert tokenizer.encode("1+2=") == [4, 13, 5, 14]
    assert tokenizer.eos_token_id == 1
    assert {file.suffix for file in directory.iterdir()} <= {".json", ".safetensors"}


def test_load_converts_to_the_dtype(directory: Path) -> None:
    assert {p.dtype for p in load_model(directory, "bfloat16").parameters()} == {torch.bfloat16}


def test_loading_says_nothing(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(directory, "float32")
    load_tokenizer(directory)
    assert capfd.readouterr() == ("", "")


def test_save_refuses_an_existing_directory(directory: Path) -> None:
    tokenizer = char_tokenizer("abc")
    with pytest.raises(FileExistsError):
        save_model_directory(build_model(QWEN3, 0, tokenizer), tokenizer, directory)


def test_load_refuses_a_missing_directory(tmp_path: Path) -> None:
    for load in (lambda path: load_model(path, "float32"), load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.path = .*nowhere.* is not a directory"):
            load(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"model\.path = .* has no config\.json; give"):
            load(tmp_path)


def test_load_refuses_pickled_weights(directory: Path, tmp_path: Path) -> None:
    path = copy_of(directory, tmp_path / "pickled")
    weights = path / "model.safetensors"
    torch.save(load_model(directory, "float32").state_dict(), path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"model\.path = .*safetensors"):
        load_model(path, "float32")


def test_load_refuses_weights_that_do_not_fill_the_model(directory: Path, tmp_path: Path) -> None:
    path = copy_of(directory, tmp_path / "deeper")
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"do not fill the model.*layers\.2"):
        load_model(path, "float32")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_load_refuses_broken_files(directory: Path, tmp_path: Path, name: str) -> None:
    path = copy_of(directory, tmp_path / "broken")
    (path / name).write_bytes(b"{")
    load = load_tokenizer if name == "tokenizer.json" else lambda p: load_model(p, "float32")
    with pytest.raises(ConfigError, match=r"model\.path = "):
        load(path)
