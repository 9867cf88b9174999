"""The shipped gates load; impossible ones are refused; nothing in them skips a check."""

import pytest
from kernarc.gates.config import GateConfig, OutputCheckConfig
from kernarc.harness.config.checkpoints import ensure_checkpoint
from kernarc.harness.config.yaml_files import load, names, parse
from kernarc.harness.errors import ConfigError


@pytest.mark.parametrize("name", names("gates"))
def test_shipped_gates_load(name: str) -> None:
    config = load(name, GateConfig)
    assert config.looks[0] >= 3
    assert config.margin == (0.25 if name == "text" else 0.01)
    assert config.output_check.max_divergence_rate == 0


def test_default_is_the_designs() -> None:
    config = load("default", GateConfig)
    assert (config.confidence, config.n_resamples, config.looks[0]) == (0.95, 10_000, 5)


def test_the_text_gate_judges_weights_whose_answers_hang_on_numerics() -> None:
    """Structured weights emit the right tokens whatever a stale cache or a wrong scale does to their logits."""
    trained = ensure_checkpoint(load("text", GateConfig).model, lambda _: None)
    assert trained.structured_acceptance is None
    assert trained.tokenizer_json is not None
    assert load("default", GateConfig).model.synth is not None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("looks: [2, 5]", "start at 3"),
        ("looks: [8, 5]", "must rise"),
        ("looks: []", "looks"),
        ("margin: 0", "margin"),
        ("margin: .nan", "margin"),
        ("margin: 1%", "margin"),
        ("confidence: 95", "confidence"),
        ("n_resamples: 10", "n_resamples"),
        ("skip_output_check: true", "unknown key"),
        ("output_check: {enabled: false}", "unknown key"),
        ("output_check: {max_divergence_rate: 1}", "max_divergence_rate"),
        ("maragin: 0.02", "did you mean 'margin'"),
    ],
)
def test_impossible_values_are_refused_with_their_line(line: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        parse(f"depths: [128]\n{line}\n", GateConfig, "my.yaml")
    assert "my.yaml, line 2" in str(refused.value)


def test_error_is_split_over_the_looks() -> None:
    config = GateConfig(depths=(128,), looks=(5, 8, 12))
    assert config.confidence_of_a_look == pytest.approx(1 - 0.05 / 3)
    assert config.launch_limit == 12


def test_no_setting_of_the_gate_is_a_switch() -> None:
    """A boolean would be a way to leave something out."""
    for model in (GateConfig, OutputCheckConfig):
        assert not [name for name, field in model.model_fields.items() if field.annotation is bool]
