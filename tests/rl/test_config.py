import pytest
import yaml

from cuewalk.rl import Config, ConfigError, load_config
from cuewalk.rl.config import config_tree


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.budgett=4", "unknown key 'env.budgett'; did you mean 'budget'?"),
        ("modell=x", "unknown key 'modell'; did you mean 'model'?"),
        ("zzz=1", "unknown key 'zzz'; known keys: budgets, compare, data"),
        ("env=4", "env is a section; got 4"),
        ("env.budget=many", r"env.budget: .*valid integer.*got 'many'"),
        ("data.source=web", r"data.source: .*'synthetic', 'locomo', 'longmemeval', 'perltqa' or 'json'"),
        ("env.k=0", r"env.k: Input should be greater than 0 \(got 0\)"),
        ("judge.preset=nice", "judge.preset: Input should be 'price', 'paper', 'memora-code' or 'gated'"),
        ("env.budget", "write section.key=value"),
        ("model.name=x", "'model' is no section"),
        ("env.budget=[", "is no YAML"),
    ],
)
def test_a_mistake_is_named_and_the_way_out_told(tmp_path, override, message):
    path = tmp_path / "c.yaml"
    path.write_text("model: smollm2-135m\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


def test_overrides_win_and_are_yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("env: {budget: 3}\ngrpo: {max_steps: 1}\n")
    config = load_config(path, ["env.budget=4", "warm_start.k=[2, 3]", "grpo.max_steps=7", "data.path=null"])
    assert (config.env.budget, config.warm_start.k, config.grpo, config.data.path) == (
        4,
        (2, 3),
        {"max_steps": 7},
        None,
    )


def test_a_number_in_scientific_notation_is_a_number(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("grpo: {learning_rate: 1e-3}\nsft: {learning_rate: -2.5E+4, note: 1e, name: e3}\n")
    config = load_config(path, ["grpo.weight_decay=3e-2"])
    assert config.grpo == {"learning_rate": 0.001, "weight_decay": 0.03}
    assert config.sft == {"learning_rate": -25000.0, "note": "1e", "name": "e3"}


def test_a_missing_file_lists_its_neighbours(tmp_path):
    (tmp_path / "demo.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"no configuration at .*found: .*demo.yaml"):
        load_config(tmp_path / "dmo.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        load_config(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("grpo", "message"),
    [
        ({"epsilon": 0.3}, "grpo.epsilon has no effect here: one update a batch"),
        ({"top_p": 0.9}, "grpo.top_p has no effect here"),
        ({"temperature": 0.7}, "set sampling.temperature"),
        ({"use_vllm": True}, "set sampling.engine"),
        ({"steps_per_generation": 2}, "set grpo.gradient_accumulation_steps"),
        ({"entropy_coef": 0.1}, "carry no gradient"),
        ({"vllm_mode": "server"}, "grpo.vllm_mode has no effect here: the rollout owns its engine"),
        ({"max_stepps": 3}, "unknown key 'grpo.max_stepps'; did you mean 'max_steps'?"),
        (
            {"num_generations": 5},
            "per_device_train_batch_size = 32 must be a multiple of grpo.num_generations = 5",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(tmp_path, grpo, message):
    from cuewalk.rl.grpo import prepare_arguments

    with pytest.raises(ConfigError, match=message):
        prepare_arguments(Config(grpo=grpo), tmp_path)


def test_defaults_are_the_papers_where_it_has_any(tmp_path):
    from cuewalk.rl.grpo import prepare_arguments

    arguments = prepare_arguments(Config(), tmp_path)
    assert (arguments.scale_rewards, arguments.beta, arguments.loss_type) == ("none", 0.0, "dapo")
    assert arguments.steps_per_generation == arguments.gradient_accumulation_steps


def test_config_tree_is_plain_data():
    assert yaml.safe_load(yaml.safe_dump(config_tree(Config()))) == config_tree(Config())
