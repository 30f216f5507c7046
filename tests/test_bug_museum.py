"""Published bugs that no learning curve shows, each put into our code, and the test that sees it.

An exhibit edits the source of one function; the named test must then fail, on the very case that
passes with the function as it is. docs/bug_museum.md is the catalogue; its figures come from
benchmarks/museum.py.
"""

import importlib
import inspect
import re
from dataclasses import dataclass

import pytest
import torch
from common import edited

from conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:.*CartPole-v0 is out of date")

FL, CP, CG, TE = (
    "frozen_lake_ppo_grpo",
    "cartpole_pg_family",
    "cartpole_grpo",
    "text_env_pairwise_grpo",
)


@dataclass
class Exhibit:
    name: str
    module: str
    function: str  # or Class.method
    source: str
    check: str  # test_file::test_name
    edits: list[tuple[str, str]]  # what must occur once in the function's source, its replacement


MUSEUM = [
    # ---- sampling and scoring ----
    Exhibit(
        "masked when sampled, not when scored",
        FL,
        "sample_batch",
        "AgileRL/AgileRL #487",
        "test_frozen_lake::test_actions_are_drawn_from_the_policy",
        [
            (
                "action_cdf = log_probs.exp()",
                "unlikely = log_probs == log_probs.amin(dim=1, keepdim=True)\n"
                "    action_cdf = log_probs.masked_fill(unlikely, -torch.inf).softmax(dim=1)",
            )
        ],
    ),
    Exhibit(
        "sampled at a temperature, scored without it",
        CG,
        "sample_batch",
        "huggingface/trl #3029",
        "test_cartpole_grpo::test_first_actions_are_the_policys",
        [("action = draw(logits, ", "action = draw(logits / 0.7, ")],
    ),
    Exhibit(
        "old log-probs taken again at each step",
        FL,
        "update_model",
        "meta-pytorch/torchforge #571",
        "test_frozen_lake::test_more_passes_move_the_ratio_and_the_clip_acts",
        [("importance_ratio(logp, batch.logp_old, ", "importance_ratio(logp, logp.detach(), ")],
    ),
    # ---- the clip ----
    Exhibit(
        "minimum taken before the advantage",
        FL,
        "clipped_surrogate",
        "takuseno/ppo #3",
        "test_frozen_lake::test_clip_golden",
        [
            (
                "torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)",
                "torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * advantages",
            )
        ],
    ),
    Exhibit(
        "maximum of the objectives",
        FL,
        "clipped_surrogate",
        "openai/baselines #1156",
        "test_frozen_lake::test_clip_golden",
        [("torch.minimum(", "torch.maximum(")],
    ),
    Exhibit(
        "clip range begins at 1 + epsilon",
        FL,
        "clipped_surrogate",
        "common",
        "test_frozen_lake::test_clip_golden",
        [("ratio.clamp(1 - low, ", "ratio.clamp(1 + low, ")],
    ),
    Exhibit(
        "lower and upper epsilon swapped",
        FL,
        "clipped_surrogate",
        "common",
        "test_frozen_lake::test_update_in_loops_where_the_clip_acts",
        [("ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)")],
    ),
    Exhibit(
        "ratio times the mean advantage",
        FL,
        "clipped_surrogate",
        "Omegastick/pytorch-cpp-rl #14",
        "test_frozen_lake::test_clip_batch_golden",
        [("torch.minimum(ratio * advantages, ", "torch.minimum(ratio * advantages.mean(), ")],
    ),
    Exhibit(
        "product for geometric mean in the sequence ratio",
        FL,
        "importance_ratio",
        "walkinglabs/hands-on-modern-rl #75",
        "test_frozen_lake::test_importance_ratio_in_loops",
        [("(log_ratio.sum(dim=1) / mask.sum(dim=1))", "log_ratio.sum(dim=1)")],
    ),
    # ---- KL and entropy ----
    Exhibit(
        "k1 in the loss",
        FL,
        "update_model",
        "Tang & Munos 2025",
        "test_frozen_lake::test_update_in_loops_where_the_clip_acts",
        [
            (
                "objective - args.beta * kl_k3(logp, logp_ref)",
                "objective - args.beta * (logp - logp_ref)",
            )
        ],
    ),
    Exhibit(
        "KL logged before the step",
        TE,
        "update_model",
        "erratum 18",
        "test_errata::test_erratum_18_the_printed_kl_is_taken_before_the_step",
        [
            (
                "logp = at_actions(trainer.log_probs(), batch.actions)",
                "logp = batch.logp_old + log_ratio",
            )
        ],
    ),
    Exhibit(
        "entropy with the wrong sign",
        FL,
        "update_model",
        "PKU-Alignment/omnisafe #133",
        "test_frozen_lake::test_entropy_bonus_raises_entropy",
        [
            (
                "surrogate + args.entropy_coef * trainer.annealing()",
                "surrogate - args.entropy_coef * trainer.annealing()",
            )
        ],
    ),
    Exhibit(
        "entropy of the sampled actions only",
        FL,
        "update_model",
        "erratum 19",
        "test_frozen_lake::test_update_in_loops_where_the_clip_acts",
        [("categorical_entropy(log_probs)[where]", "-(logp.exp() * logp)")],
    ),
    # ---- the group ----
    Exhibit(
        "a group of one",
        CG,
        "build_parser",
        "erratum 7",
        "test_errata::test_erratum_7_the_std_of_one_member_is_nan",
        [('flag("--group_size", type=number(int, 2)', 'flag("--group_size", type=number(int, 1)')],
    ),
    Exhibit(
        "standard deviation with ddof 0",
        FL,
        "compute_grpo",
        "common",
        "test_frozen_lake::test_grpo_advantages_golden",
        [("scores.std(dim=1, keepdim=True)", "scores.std(dim=1, keepdim=True, correction=0)")],
    ),
    Exhibit(
        "flat group divided by its rounding",
        FL,
        "compute_grpo",
        "erratum 10; NVIDIA-NeMo/RL #4161",
        "test_frozen_lake::test_flat_group_is_exactly_zero_in_float32",
        [
            (
                "(scores.std(dim=1, keepdim=True) + 1e-4)",
                "(scores.std(dim=1, keepdim=True) + 1e-8)",
            ),
            (".masked_fill(flat_groups(scores)[:, None], 0.0)", ""),
        ],
    ),
    Exhibit(
        "mean of the batch for the group's",
        FL,
        "compute_grpo",
        "XU-YIJIE/grpo-flat #2",
        "test_frozen_lake::test_grpo_advantages_in_loops",
        [("scores - scores.mean(dim=1, keepdim=True)", "scores - scores.mean()")],
    ),
    Exhibit(
        "episodes of other prompts in the group",
        FL,
        "sample_batch",
        "dllm-reasoning/d1 #19",
        "test_frozen_lake::test_a_start_anywhere",
        [("(first + start).repeat_interleave(group_size)", "(first + start).repeat(group_size)")],
    ),
    Exhibit(
        "members of a group start apart",
        CP,
        "Trainer.start_episodes",
        "microsoft/agent-lightning #489",
        "test_cartpole_pg_family::test_a_group_shares_its_start",
        [('if self.args.adv_estimator == "grpo":', "if False:")],
    ),
    Exhibit(
        "one member's reward for all",
        CG,
        "prepare_inputs",
        "erratum 8",
        "test_cartpole_grpo::test_advantages_in_loops",
        [
            (
                "scores = scores.view_as(batch.actions)",
                "scores = scores.view_as(batch.actions)[:, :1].expand_as(batch.actions)",
            )
        ],
    ),
    Exhibit(
        "advantages laid out along the wrong axis",
        FL,
        "prepare_grpo",
        "common",
        "test_frozen_lake::test_group_advantages_reach_every_step",
        [("return advantages.view(-1, 1)", "return advantages.T.reshape(-1, 1)")],
    ),
    Exhibit(
        "pairwise loss without a sigmoid",
        TE,
        "pairwise_logistic",
        "erratum 16",
        "test_errata::test_erratum_16_the_printed_pairwise_loss_is_linear",
        [
            ("p = pair_differences(scores / temperature).sigmoid()", ""),
            (
                "F.binary_cross_entropy_with_logits(\n"
                '        pair_differences(log_weights), p, reduction="none"\n'
                "    )",
                "-(\n        F.logsigmoid(pair_differences(scores / temperature))\n"
                "        * pair_differences(log_weights)\n    )",
            ),
        ],
    ),
    Exhibit(
        "product for mean in the text's weight",
        TE,
        "trajectory_log_weights",
        "common",
        "test_text_env::test_trajectory_log_weights_in_loops",
        [
            (
                "log_ratio.logsumexp(dim=-1) - math.log(log_ratio.shape[-1])",
                "log_ratio.sum(dim=-1)",
            )
        ],
    ),
    # ---- returns, GAE, the end of an episode ----
    Exhibit(
        "out of time treated as death",
        CP,
        "prepare_inputs",
        "erratum 14; vwxyzjn/cleanrl #198; Pardo et al. 2018",
        "test_errata::test_erratum_14_the_time_limit_is_not_done",
        [
            (
                "ends = batch.terminated, batch.truncated",
                "ends = batch.terminated | batch.truncated, batch.truncated",
            )
        ],
    ),
    Exhibit(
        "GAE not cut at an episode's end",
        CP,
        "compute_gae",
        "vietnh1009/Super-mario-bros-PPO-pytorch #21",
        "test_cartpole_pg_family::test_gae_in_loops",
        [("(~(terminated | truncated)).to(delta.dtype)", "torch.ones_like(delta)")],
    ),
    Exhibit(
        "GAE not cut at the time limit",
        CP,
        "compute_gae",
        "Toni-SM/skrl #224",
        "test_cartpole_pg_family::test_gae_in_loops",
        [("(~(terminated | truncated))", "(~terminated)")],
    ),
    Exhibit(
        "GAE cut one step off",
        CP,
        "compute_gae",
        "DLR-RM/stable-baselines3 #105",
        "test_cartpole_pg_family::test_gae_in_loops",
        [
            (
                "delta[:, t] + decay[:, t] * following",
                "delta[:, t] + decay[:, max(t - 1, 0)] * following",
            )
        ],
    ),
    Exhibit(
        "GAE adds its own zero",
        FL,
        "compute_gae",
        "4kasha/CartPole_PPO #1",
        "test_frozen_lake::test_gae_is_the_discounted_sum_of_deltas",
        [
            (
                "delta[:, t] + decay[:, t] * following",
                "delta[:, t] + decay[:, t] * advantages[:, t]",
            )
        ],
    ),
    Exhibit(
        "reward on an extra row after the end",
        FL,
        "sample_batch",
        "erratum 2; huggingface/trl #1893",
        "test_frozen_lake::test_rollout_equals_200_gymnasium_environments",
        [
            (
                "rewards=lakes.reward.flatten()[outcomes] * mask",
                "rewards=F.pad(lakes.reward.flatten()[outcomes] * mask, (1, 0))[:, :-1]",
            )
        ],
    ),
    Exhibit(
        "autoreset's row trained on",
        CP,
        "sample_batch",
        "Denys88/rl_games #362",
        "test_cartpole_pg_family::test_returns_over_many_rollouts",
        [("mask = ~trainer.ended", "mask = np.ones_like(trainer.ended)")],
    ),
    Exhibit(
        "whitened inside each trajectory",
        FL,
        "prepare_ppo",
        "erratum 3",
        "test_frozen_lake::test_ppo_advantages_and_returns",
        [
            (
                "return whiten(advantages, batch.mask), ",
                "rows = zip(advantages[:, None], batch.mask[:, None])\n"
                "    return torch.cat([whiten(*row) for row in rows]), ",
            )
        ],
    ),
    Exhibit(
        "whitened without the parentheses",
        FL,
        "whiten",
        "Omegastick/pytorch-cpp-rl #14",
        "test_frozen_lake::test_whiten_in_loops",
        [
            (
                "(x - kept.mean() if shift_mean else x) / (std + 1e-8) * mask",
                "(x - kept.mean() / (std + 1e-8)) * mask",
            )
        ],
    ),
    Exhibit(
        "trajectory mean as the baseline",
        CP,
        "compute_baseline",
        "erratum 12",
        "test_errata::test_erratum_12_the_trajectory_mean_is_a_biased_baseline",
        [('if kind == "trajectory_mean":', 'if kind in ("value", "trajectory_mean"):')],
    ),
    # ---- the critic ----
    Exhibit(
        "whitened advantages in the critic's target",
        FL,
        "prepare_ppo",
        "luchris429/model-free-opponent-shaping #1",
        "test_frozen_lake::test_ppo_advantages_and_returns",
        [
            (
                "batch.mask), advantages + values",
                "batch.mask), whiten(advantages, batch.mask) + values",
            )
        ],
    ),
    Exhibit(
        "critic's target is its own value",
        FL,
        "prepare_ppo",
        "vwxyzjn/cleanrl #337",
        "test_frozen_lake::test_ppo_advantages_and_returns",
        [("batch.mask), advantages + values", "batch.mask), torch.zeros_like(values) + values")],
    ),
    Exhibit(
        "advantage not detached from the critic",
        TE,
        "hybrid_loss",
        "keras-team/keras-io #194",
        "test_text_env::test_the_critic_learns_the_expected_reward_to_go",
        [("returns - values.detach()", "returns - values")],
    ),
    Exhibit(
        "a column against a row",
        CP,
        "value_loss",
        "erratum 14; pytorch/pytorch #16045",
        "test_cartpole_pg_family::test_update_in_loops_where_the_clip_acts",
        [("assert values.shape == returns.shape", "values = values[..., None]")],
    ),
    # ---- masks ----
    Exhibit(
        "padding with a gradient",
        FL,
        "aggregate",
        "verl-project/verl #3805",
        "test_frozen_lake::test_aggregate_in_loops",
        [("per_step = per_step.masked_fill(~mask, 0.0)", "")],
    ),
    Exhibit(
        "masked after exp: 0 * inf",
        FL,
        "importance_ratio",
        "OpenRLHF/OpenRLHF #1314",
        "test_frozen_lake::test_importance_ratio_in_loops",
        [
            ("(logp - logp_old).masked_fill(~mask, 0.0)", "logp - logp_old"),
            ("return log_ratio.exp()", "return log_ratio.exp() * mask"),
        ],
    ),
    Exhibit(
        "mean over each episode's length",
        FL,
        "aggregate",
        "Liu et al. 2025; huggingface/trl #2995",
        "test_frozen_lake::test_aggregate_in_loops",
        [
            (
                "return per_step.sum() / mask.sum()",
                "return (per_step.sum(dim=1) / mask.sum(dim=1)).mean()",
            )
        ],
    ),
    # ---- the step ----
    Exhibit(
        "gradient clipped before backward",
        FL,
        "update_model",
        "simchowitzlabpublic/nano-world-model #22",
        "test_frozen_lake::test_each_network_has_its_own_rate_and_clip",
        [
            ("        loss.backward()\n", ""),
            ("trainer.optimizer.step()", "loss.backward()\n        trainer.optimizer.step()"),
        ],
    ),
    Exhibit(
        "gradient's norm logged after its clip",
        FL,
        "update_model",
        "common",
        "test_frozen_lake::test_each_network_has_its_own_rate_and_clip",
        [
            (
                'metrics.setdefault("grad_norm", grad_norm)',
                'again = nn.utils.clip_grad_norm_(group["params"], math.inf)\n'
                '            metrics.setdefault("grad_norm", again)',
            )
        ],
    ),
    # ---- the run ----
    Exhibit(
        "checkpoint that forgets a generator",
        FL,
        "Trainer.load_model",
        "modelscope/ms-swift #9935",
        "test_frozen_lake::test_resume_equals_never_stopping",
        [("self.generator.set_state(sampler)", "pass")],
    ),
    Exhibit(
        "time limit forgotten in a branch",
        CG,
        "branch",
        "erratum 10",
        "test_errata::test_erratum_10_the_limit_is_kept",
        [("visits.steps.repeat(group_size)", "0 * visits.steps.repeat(group_size)")],
    ),
]


def on_display(exhibit: Exhibit):
    """The function of the exhibit, edited, in its place."""
    module = importlib.import_module(exhibit.module)
    return edited(module, exhibit.function, *exhibit.edits)


def cases(test) -> list[dict]:
    """Arguments of each case of a parametrised test, in pytest's order."""
    found: list[dict] = [{}]
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            found = [a | dict(zip(names, row, strict=True)) for a in found for row in rows]
    return found


def run(test, case: dict, request) -> None:
    """The test with a fresh seed, folder and monkeypatch."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        own = {
            "monkeypatch": lambda: patch,
            "tmp_path": lambda: request.getfixturevalue("tmp_path_factory").mktemp("museum"),
        }
        names = inspect.signature(test).parameters.keys() - case.keys()
        test(**case, **{n: own[n]() if n in own else request.getfixturevalue(n) for n in names})


@pytest.mark.parametrize("exhibit", MUSEUM, ids=lambda e: e.name)
def test_the_named_check_sees_the_bug(exhibit, request):
    file, name = exhibit.check.split("::")
    test = getattr(importlib.import_module(file), name)
    for case in cases(test):
        with on_display(exhibit):
            try:
                run(test, case, request)
                continue
            except (AssertionError, pytest.fail.Exception) as error:
                print(error)
        run(test, case, request)  # as it is, the same case passes
        return
    pytest.fail(f"survives {exhibit.check}")


def test_an_exhibit_that_no_longer_applies_is_refused():
    stale = Exhibit("stale", FL, "whiten", "", "", [("no such line", "")])
    with pytest.raises(AssertionError, match="no longer once"), on_display(stale):
        pass


def test_the_catalogue_is_the_museum():
    """Every exhibit is a row of docs/bug_museum.md, in order, with its source and its check."""
    page = (ROOT / "docs" / "bug_museum.md").read_text(encoding="utf-8")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)  # links: their text
    rows = [line.strip("| ").split(" | ") for line in plain.splitlines() if line.startswith("| ")]
    assert all(len(row) == 4 and all(row) for row in rows)
    shown = [(name, source, check) for name, _, source, check in rows[1:]]
    assert shown == [
        (e.name, e.source, f"`{e.check.split('::')[1]}` ({e.check.split('::')[0][5:]})")
        for e in MUSEUM
    ]
    assert len({e.name for e in MUSEUM}) == len(MUSEUM) >= 22
