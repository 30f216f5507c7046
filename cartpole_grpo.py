# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.4", "gymnasium[classic-control,toy-text]>=1.0", "numpy>=1.26",
#     "tensorboard>=2.20", "tqdm>=4.66",
# ]
# ///
"""GRPO on CartPole with a group of actions at every state: branch the simulator, compare, learn.

Article: [学习笔记]grpo——逃课与统计学的魅力时刻
Run:     python cartpole_grpo.py                    (1 s of training, 4 s in all)
         ends with: solved after ... environment steps, ...
Watch:   tensorboard --logdir runs
Show:    python cartpole_grpo.py --infer runs/cartpole_grpo/NAME/checkpoint-last.pt --render gif

The article's idea: at one state sample a group of actions; their mean stands in for the critic.
As printed only one of the actions is executed and all get its reward, so nothing is compared and no
weight ever moves (errata 7 to 10). Here every action of the group is executed, each in a copy of
the simulator; its branch then follows the policy for horizon steps, and the branch's return,
against its group's, is the advantage of the branch's first action.

Keeps:   several actions a state, normalised in their group, no critic; PPO's clip, K epochs; group
         size, gamma, clip, batch size; the shaped reward (--reward shaped).
Changes: branches are really run, and longer than one step (erratum 9); the horizon grows when most
         groups are flat; flat groups are left out (erratum 10); the 500-step limit is kept; tanh,
         learning rate 1e-3.
Assumes: a branch that is still up at the horizon is worth what it has earned so far: the rest
         counts 0 for all of them. Costs: copies of the simulator, and every branch step counts.

symbol   | variable     | shape     | meaning
S        | observations | (S, 4)    | states visited by the current policy, num_states at most
G        | actions      | (S, G)    | group_size first actions at each state
H        | horizon      |           | steps of a branch
R        | returns      | (S, G)    | discounted rewards of a branch, until it falls or H
A        | advantages   | (S, G)    | R against the mean (and std) of its group
rho      | ratio        | (R,)      | pi(a|s) / pi_old(a|s), R rows of a minibatch
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor, nn
from tqdm import tqdm

# ======== 1  The maths ============================================================================


def discounted_return(rewards: Tensor, gamma: float) -> Tensor:
    """(E,) return of rewards (E, T). Below gamma 1, a shorter walk to the goal is worth more."""
    # R = sum_t gamma^t * r_t
    t = torch.arange(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    return (rewards * gamma**t).sum(dim=1)


def compute_grpo(scores: Tensor, scale_rewards: str = "group") -> Tensor:
    """Group-relative advantages (B, G) of scores (B, G) (DeepSeekMath 4.1.2; 群体标准化).

    scale_rewards: divide by the std of the "group" or of the whole "batch", or not ("none", Dr.
    GRPO). The std is unbiased (ddof 1) plus 1e-4, as in TRL. A flat group gets exactly 0.
    """
    # A_i = (R_i - mean(R)) / (std(R) + eps)
    advantages = scores - scores.mean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (scores.std(dim=1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.masked_fill(flat_groups(scores)[:, None], 0.0)


def compute_rloo(scores: Tensor) -> Tensor:
    """Leave-one-out advantages (B, G) (Kool et al. 2019; Ahmadian et al. 2024)."""
    # A_i = R_i - mean_{j != i}(R_j) = (R_i - mean(R)) * G / (G - 1)
    group_size = scores.shape[1]
    advantages = (scores - scores.mean(dim=1, keepdim=True)) * group_size / (group_size - 1)
    return advantages.masked_fill(flat_groups(scores)[:, None], 0.0)


def flat_groups(scores: Tensor) -> Tensor:
    """(B,) bool: all scores equal. No signal; dividing by their std would amplify rounding."""
    return scores.amax(dim=1) == scores.amin(dim=1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's objective per step, to be maximised (Schulman et al. 2017, eq. 7; high: DAPO)."""
    assert ratio.shape == advantages.shape
    # min(rho * A, clip(rho, 1 - low, 1 + high) * A)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimates KL(pi || pi_ref) at actions sampled from pi; never negative (Schulman 2020)."""
    # k3 = pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = logp_ref - logp
    return log_ratio.exp() - log_ratio - 1


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension."""
    # H = -sum_a pi(a) * log pi(a)
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def shaped_reward(x: np.ndarray, theta: np.ndarray, x_max: float, theta_max: float) -> np.ndarray:
    """The article's reward of a state: near the middle of the track, and upright (code)."""
    # r = (x_max - |x|) / x_max - 0.8 + (theta_max - |theta|) / theta_max - 0.5
    return (x_max - abs(x)) / x_max - 0.8 + (theta_max - abs(theta)) / theta_max - 0.5


# ======== 2  Environment: gymnasium's own vector CartPole =========================================


def make_envs(env_id: str, num_envs: int) -> CartPoleVectorEnv:
    """num_envs CartPoles in one. Autoreset is next-step: the row after an end is no transition."""
    envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point").unwrapped
    assert isinstance(envs, CartPoleVectorEnv)
    return envs


def branch(visits: CartPoleVectorEnv, branches: CartPoleVectorEnv, group_size: int) -> np.ndarray:
    """Put group_size copies of every visited environment into branches. Returns (S * G, 4)."""
    state = np.asarray(visits.state).repeat(group_size, axis=1)  # (4, S) -> (4, S * G)
    branches.state = state  # type: ignore[assignment]
    branches.steps = visits.steps.repeat(group_size)  # the time limit goes on in a branch
    branches.prev_done = np.zeros(branches.num_envs, dtype=bool)
    return state.T.astype(np.float32)


# ======== 3  Networks =============================================================================


def mlp(hidden: int, outputs: int, gain: float) -> nn.Module:
    """(R, 4) -> (R, outputs): logits, or V. Orthogonal weights, biases 0 (as in SB3, CleanRL)."""
    sizes = [4, hidden, hidden, outputs]
    linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for layer, scale in zip(linear, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """(N,) actions from softmax of logits (N, A): Gumbel-max, twice as fast as multinomial."""
    # argmax_a(logit_a - log(e_a)), e_a ~ Exp(1)
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log()).argmax(1)


# ======== 4  Rollout: the policy is frozen ========================================================


@dataclass
class Batch:
    """S states, G branches from each, H steps at most in a branch."""

    observations: Tensor  # (S, 4) float
    mask: Tensor  # (S,) bool: an episode was on; the others are ends, where nobody acts
    actions: Tensor  # (S, G) long: the first action of each branch
    logp_old: Tensor  # (S, G) float
    rewards: Tensor  # (S, G, H) float: 0 after a branch's end


@torch.no_grad()
def visit(trainer: Trainer) -> None:
    """visit_steps further steps of the policy in each of the S environments."""
    for _ in range(trainer.args.visit_steps):
        observation = torch.as_tensor(trainer.observation, device=trainer.device)  # (S, 4)
        logits = trainer.actor(observation)  # (S, 2)
        u = torch.rand(len(logits), 1, generator=trainer.generator, device=logits.device)
        logits = logits.masked_fill(u < trainer.args.random_visits, 0.0)  # uniform
        action = draw(logits, trainer.generator).cpu().numpy()
        trainer.env_steps += int((~trainer.ended).sum())  # next-step autoreset: others only reset
        trainer.observation, reward, terminated, truncated, _ = trainer.envs.step(action)
        trainer.ended = terminated | truncated
        trainer.count(reward, trainer.ended)


@torch.no_grad()
def sample_batch(trainer: Trainer) -> Batch:
    """From each visited state G branches: a first action of its own, then the policy."""
    # differs: branches, not episodes
    args, device, envs = trainer.args, trainer.device, trainer.branches
    shape = args.num_states, args.group_size
    observation = branch(trainer.envs, envs, args.group_size)  # (S * G, 4)
    alive = (~trainer.ended).repeat(args.group_size)  # (S * G,)
    first = logp = torch.empty(0)
    rewards = []
    for step in range(trainer.horizon):
        logits = trainer.actor(torch.as_tensor(observation, device=device))  # (S * G, 2)
        action = draw(logits, trainer.generator)  # (S * G,)
        if step == 0:
            first, logp = action, logits.log_softmax(dim=1).gather(1, action[:, None])
        observation, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
        if args.reward == "shaped":
            x, _, theta, _ = np.asarray(envs.state)
            reward = shaped_reward(x, theta, envs.x_threshold, envs.theta_threshold_radians)
        rewards.append((reward * alive).astype(np.float32))
        trainer.env_steps += int(alive.sum())
        alive = alive & ~(terminated | truncated)
        if not alive.any():
            break
    return Batch(
        torch.as_tensor(trainer.observation, device=device),
        torch.as_tensor(~trainer.ended, device=device),
        first.view(shape),
        logp.view(shape),  # (S * G, 1) -> (S, G)
        torch.as_tensor(np.stack(rewards, axis=1), device=device).view(*shape, len(rewards)),
    )


# ======== 5  Update: the policy moves =============================================================


def prepare_inputs(args: argparse.Namespace, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns of the branches (S, G), and the advantages (S, G) of their first actions."""
    # differs: branches, not episodes
    scores = discounted_return(batch.rewards.flatten(0, 1), args.gamma)  # (S * G, H) -> (S * G,)
    scores = scores.view_as(batch.actions)  # (S, G)
    if args.adv_estimator == "grpo":
        return scores, compute_grpo(scores)
    if args.adv_estimator == "rloo":
        return scores, compute_rloo(scores)
    return scores, scores  # none: no comparison; survival: all positive


def update_model(trainer: Trainer, batch: Batch, advantages: Tensor, use: Tensor) -> None:
    """k_epochs passes in minibatches over the branches of the states in use (S,) bool."""
    # differs: no critic
    args, epsilon = trainer.args, trainer.args.clip_epsilon
    size = args.group_size
    observations = batch.observations[use].repeat_interleave(size, dim=0)  # (R, 4)
    actions, logp_old = batch.actions[use].flatten(), batch.logp_old[use].flatten()  # (R,)
    advantages = advantages[use].flatten()  # (R,)
    for _ in range(args.k_epochs):
        order = torch.randperm(len(actions), generator=trainer.generator, device=actions.device)
        for rows in order.split(args.batch_size):
            log_probs = trainer.actor(observations[rows]).log_softmax(dim=1)  # (R, 2)
            logp = log_probs.gather(1, actions[rows, None]).squeeze(1)  # (R, 1) -> (R,)
            entropy = categorical_entropy(log_probs).mean()
            ratio = (logp - logp_old[rows]).exp()
            # J = E[min(rho * A, clip(rho) * A)]
            objective = clipped_surrogate(ratio, advantages[rows], epsilon, epsilon).mean()
            loss = -(objective + args.entropy_coef * entropy)
            trainer.optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(trainer.actor.parameters(), args.max_grad_norm)
            check_finite(loss=loss, gradient=grad_norm)
            trainer.optimizer.step()
            with torch.no_grad():
                metrics = {
                    "losses/policy_loss": -objective,
                    "losses/entropy": entropy,
                    "losses/approx_kl": kl_k3(logp_old[rows], logp).mean(),
                    "losses/clipfrac": ((ratio - 1).abs() > epsilon).float().mean(),
                    "losses/grad_norm": grad_norm,
                }
            trainer.record(metrics)


def check_finite(**tensors: Tensor) -> None:
    """FloatingPointError with the tensor's name where one is NaN or infinite."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{name} is NaN or infinite")


# ======== 6  Evaluation: on starts never trained on ===============================================

UNSEEN = 2**31  # the seed of all evaluations; --seed is below


@torch.no_grad()
def evaluate(
    policy: Callable[[Tensor], Tensor], envs: CartPoleVectorEnv, device, seed: int = UNSEEN
) -> dict[str, float]:
    """Mean return of a policy, observations (R, 4) -> logits (R, 2), in one episode of each env.

    The first half of envs takes the most likely action, the other half samples. Called again, it
    gives the same starts and the same draws.
    """
    # differs: episodes here; exact on FrozenLake
    generator = torch.Generator(device).manual_seed(seed)
    observation, _ = envs.reset(seed=seed)
    half, returns = envs.num_envs // 2, np.zeros(envs.num_envs)
    alive = np.ones(envs.num_envs, dtype=bool)
    while alive.any():
        logits = policy(torch.as_tensor(observation, device=device))
        action = torch.cat([logits[:half].argmax(dim=1), draw(logits[half:], generator)])
        observation, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
        returns += reward * alive
        alive &= ~(terminated | truncated)
    return {"eval/greedy": returns[:half].mean(), "eval/sampled": returns[half:].mean()}


# ======== 7  Trainer: state, checkpoints, run folder, loop ========================================

SCRIPT = "cartpole_grpo"
LOG_EVERY = 1000  # environment steps from one logged row to the next, or an update where longer
FIRST_HORIZON = 20  # where it grows


class Trainer:
    """All that a run changes, and one update of it. Making a Trainer writes nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        self.args, self.device = args, torch.device(auto if args.device == "auto" else args.device)
        self.env_steps, self.updates, self.train_seconds = 0, 0, 0.0
        self.horizon = args.horizon or FIRST_HORIZON
        torch.manual_seed(args.seed)  # networks
        self.generator = torch.Generator(self.device).manual_seed(args.seed)  # actions, minibatches
        self.envs = make_envs(args.env_id, args.num_states)
        self.observation, _ = self.envs.reset(seed=args.seed)  # (S, 4)
        self.ended = np.zeros(args.num_states, dtype=bool)  # its last step was an episode's last
        self.running = np.zeros(args.num_states)  # return of the episode so far
        self.branches = make_envs(args.env_id, args.num_states * args.group_size)
        self.branches.reset(seed=args.seed)  # their starts are never used
        self.groups = self.flat = 0  # in the whole run; of them, with equal returns
        self.finished: list[float] = []  # returns of episodes since the last logged row
        self.sums: dict[str, tuple[float, int]] = {}  # of metrics since then, and of how many
        self.eval_envs = make_envs(args.env_id, 2 * args.eval_episodes)
        self.actor = mlp(args.hidden_size, 2, gain=0.01).to(self.device)
        fused = self.device.type != "mps"
        self.optimizer = torch.optim.Adam(
            self.actor.parameters(), lr=args.learning_rate, eps=1e-5, fused=fused
        )
        self.parts: dict = {"actor": self.actor, "optimizer": self.optimizer}

    def count(self, reward: np.ndarray, done: np.ndarray) -> None:
        """Returns of episodes from rewards (N,) and ends (N,) of a step."""
        self.running += reward
        if done.any():
            self.finished += self.running[done].tolist()
            self.running[done] = 0

    def record(self, metrics: dict) -> None:
        """Add metrics to the sums of the row to be logged next."""
        for name, value in metrics.items():
            total, number = self.sums.get(name, (0.0, 0))
            value = value.item() if isinstance(value, Tensor) else value
            self.sums[name] = total + value, number + 1

    def update(self) -> None:
        """Visits, branches, advantages, gradient steps; a longer horizon where most are flat."""
        args = self.args
        visit(self)
        batch = sample_batch(self)
        if not batch.mask.any():  # all have just ended
            return
        scores, advantages = prepare_inputs(args, batch)
        check_finite(advantages=advantages)
        flat = flat_groups(scores)
        use = batch.mask if args.adv_estimator == "none" else batch.mask & ~flat
        groups, flats = int(batch.mask.sum()), int((batch.mask & flat).sum())
        self.groups, self.flat = self.groups + groups, self.flat + flats
        self.record(
            {
                "group/zero_std_frac": flats / groups,
                "group/reward_std": scores[batch.mask].std(dim=1).mean(),
                "charts/horizon": self.horizon,
            }
        )
        if use.any():
            update_model(self, batch, advantages, use)
        if args.horizon is None and flats > args.grow_above * groups:
            # NOT IN ARTICLE: nearly all survive this long; only a longer look can tell them apart
            self.horizon = min(math.ceil(1.5 * self.horizon), self.envs.max_episode_steps)
        self.updates += 1

    def row(self) -> dict[str, float]:
        """Metrics by TensorBoard tag since the last call."""
        metrics = {name: total / number for name, (total, number) in self.sums.items()} | {
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            "charts/updates": self.updates,
            "charts/train_seconds": self.train_seconds,
            "charts/SPS": self.env_steps / self.train_seconds,
        }
        if self.finished:  # since the last row
            score = np.array(self.finished)
            metrics |= {f"score/{k}": getattr(score, k)() for k in ("mean", "max", "min")}
            metrics["charts/episodic_return"] = score.mean()
            metrics["charts/episodic_length"] = score.mean()  # CartPole: 1 a step
        self.finished, self.sums = [], {}
        return metrics

    def save_model(self, path: Path) -> None:
        """Write a checkpoint by way of a temporary file: if that fails, the old one is whole."""
        envs = self.envs
        arrays = envs.state, envs.steps, envs.prev_done, self.observation, self.ended, self.running
        checkpoint = {
            "script": SCRIPT,
            "config": vars(self.args),
            "counters": (self.env_steps, self.updates, self.train_seconds),
            "groups": (self.groups, self.flat, self.horizon),
            "pending": (self.finished, self.sums),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "envs": [torch.as_tensor(x) for x in arrays],
            "rng": envs.np_random.bit_generator.state,
            "generators": self.generator.get_state(),
        }
        torch.save(checkpoint, buffer := io.BytesIO())
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(buffer.getbuffer())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def load_model(self, path: str) -> None:
        """Restore everything that save_model wrote."""
        checkpoint, envs = load_checkpoint(path), self.envs
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint["parts"][name])
        self.env_steps, self.updates, self.train_seconds = checkpoint["counters"]
        self.groups, self.flat, self.horizon = checkpoint["groups"]
        self.finished, self.sums = checkpoint["pending"]
        arrays = (x.numpy() for x in checkpoint["envs"])
        envs.state, envs.steps, envs.prev_done, self.observation, self.ended, self.running = arrays
        envs.np_random.bit_generator.state = checkpoint["rng"]
        if checkpoint["generators"].shape == self.generator.get_state().shape:  # else: other device
            self.generator.set_state(checkpoint["generators"])


def load_checkpoint(path: str) -> dict:
    """A checkpoint of this script. ArgumentTypeError says what is wrong with the file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a missing, damaged or foreign file
        known = isinstance(error, OSError) and error.filename  # missing, no permission, a folder
        reason = error.strerror if known else "damaged or foreign"
        raise argparse.ArgumentTypeError(f"{path} can't be loaded: {reason}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("script") != SCRIPT:
        raise argparse.ArgumentTypeError(f"{path} is not a checkpoint of {SCRIPT}.py")
    return checkpoint


def new_folder(parent: Path, name: str) -> Path:
    """Make parent/name, or name-2, name-3, ...: a run is never overwritten."""
    folder, k = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            k += 1
            folder = parent / f"{name}-{k}"


def open_run(folder: Path, args: argparse.Namespace, step: int) -> tuple:
    """Write config.json; open TensorBoard and metrics.jsonl, less what was logged after step."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import, so only where it is used

    head = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    git = shutil.which("git") and subprocess.run(head, capture_output=True, text=True)
    config = vars(args) | {
        "git_commit": git.stdout.strip() if git and git.returncode == 0 else None,
        "torch": torch.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = folder / "metrics.jsonl"
    old = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [row for row in old if row.endswith("}\n") and json.loads(row)["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")
    return SummaryWriter(str(folder), purge_step=step + 1), path.open("a", encoding="utf-8")


def train(args: argparse.Namespace) -> dict:
    """Train as parse_args() says. Returns the last evaluation, counters and the run folder."""
    # differs: one run; the horizon and the flat share are results
    began, trainer = time.perf_counter(), Trainer(args)
    if args.resume:
        trainer.load_model(args.resume)
        folder = Path(args.resume).parent
    else:
        folder = new_folder(Path(args.output_dir) / SCRIPT, args.run_name)
    writer, rows = open_run(folder, args, trainer.env_steps)
    total = None if args.target_return else args.max_steps  # most runs end long before
    progress = {"total": total, "initial": trainer.env_steps, "disable": args.quiet or None}
    bar = tqdm(desc=folder.name, unit=" steps", unit_scale=True, **progress)
    stop: list[bool] = []

    def on_interrupt(*_: object) -> None:
        if not args.quiet:
            tqdm.write("finishing this update, then saving; Ctrl-C again stops at once")
        stop.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def log(metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, trainer.env_steps)
        finite = {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()}
        rows.write(json.dumps({"step": trainer.env_steps} | finite) + "\n")
        rows.flush()

    main_thread = threading.current_thread() is threading.main_thread()  # else no signal comes
    previous = signal.signal(signal.SIGINT, on_interrupt) if main_thread else None
    done = False
    try:
        result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
        if not args.resume:
            log(result)
        while not (done or stop):
            before, start = trainer.env_steps, time.perf_counter()
            with torch.autograd.set_detect_anomaly(args.detect_anomaly):
                trainer.update()
            trainer.train_seconds += time.perf_counter() - start
            step, metrics = trainer.env_steps, {}
            evaluates, logs, saves = (
                every > 0 and step // every > before // every
                for every in (args.eval_every, LOG_EVERY, args.save_steps)
            )
            done = step >= args.max_steps
            if evaluates or done:
                metrics = result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
                done |= min(result.values()) >= args.target_return > 0
            if logs or metrics:
                metrics = trainer.row() | metrics
                log(metrics)
                shown = {name: v for name, v in metrics.items() if name == "score/mean"} | result
                bar.set_postfix({name.split("/")[1]: f"{v:.1f}" for name, v in shown.items()})
            bar.update(step - before)
            if saves:
                trainer.save_model(folder / f"checkpoint-{step:06d}.pt")
                trainer.save_model(folder / "checkpoint-last.pt")
        trainer.save_model(folder / "checkpoint-last.pt")
        if done:
            flags = {k: v for k, v in vars(args).items() if v is not None}
            scores = {name.replace("eval", "hparam"): value for name, value in result.items()}
            writer.add_hparams(flags, scores, run_name=".")
            add_gif(writer, "agent/sampled", play(trainer.actor, args, "rgb_array")[0], 80, step)
        else:
            result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
    except (FloatingPointError, OSError) as error:
        where = f"update {trainer.updates + 1}: " if isinstance(error, FloatingPointError) else ""
        raise type(error)(f"{where}{error}; run: {folder}") from error
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, previous)
        bar.close()
        rows.close()
        writer.close()
    return {name[5:]: float(value) for name, value in result.items()} | {
        "solved": bool(min(result.values()) >= threshold(args)),
        "env_steps": trainer.env_steps,
        "updates": trainer.updates,
        "train_seconds": trainer.train_seconds,
        "seconds": time.perf_counter() - began,
        "horizon": trainer.horizon,
        "flat": trainer.flat / max(1, trainer.groups),
        "run_dir": str(folder),
        "stopped": not done,
    }


def play(actor: nn.Module, args: argparse.Namespace, render_mode: str | None) -> tuple:
    """An episode of gymnasium's environment. Returns (every fourth frame, return)."""
    # differs: another environment
    if render_mode != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draws where there is no screen, too
    env = gym.make(args.env_id, render_mode=render_mode)
    device = next(actor.parameters()).device
    generator = torch.Generator(device).manual_seed(args.seed)
    observation, _ = env.reset(seed=UNSEEN + args.seed)
    frames, total, done = [], 0.0, False
    while not done:
        if total % 4 == 0 and render_mode == "rgb_array":
            frames.append(np.asarray(env.render())[1::2, ::2])  # odd rows: one is the track
        with torch.no_grad():
            logits = actor(torch.as_tensor(observation, device=device)[None])  # (1, 2)
        action = logits.argmax() if args.greedy else draw(logits, generator)
        observation, reward, terminated, truncated, _ = env.step(int(action))
        total += float(reward)
        done = terminated or truncated
    env.close()
    return frames, total


def gif_bytes(frames: list[np.ndarray], milliseconds: int) -> bytes:
    """Frames (H, W, 3), each shown for milliseconds, as an endless GIF."""
    from PIL import Image

    first, *rest = map(Image.fromarray, frames)
    loop = {"save_all": True, "append_images": rest, "duration": milliseconds, "loop": 0}
    first.save(buffer := io.BytesIO(), "GIF", **loop)
    return buffer.getvalue()


def add_gif(writer, tag: str, frames: list[np.ndarray], milliseconds: int, step: int) -> None:
    """An animated image in TensorBoard (its add_video needs moviepy)."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width, _ = frames[0].shape
    gif = gif_bytes(frames, milliseconds)
    image = Summary.Image(height=height, width=width, encoded_image_string=gif)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def infer(args: argparse.Namespace) -> None:
    """Judge a trained agent on unseen starts, and show an episode."""
    # differs: another environment
    trainer = Trainer(args)
    trainer.actor.load_state_dict(load_checkpoint(args.infer)["parts"]["actor"])
    result = evaluate(trainer.actor, trainer.eval_envs, trainer.device)
    print(returns_line({name[5:]: value for name, value in result.items()}, args))
    modes = {"none": None, "human": "human", "gif": "rgb_array"}
    frames, total = play(trainer.actor, args, modes[args.render])
    if args.render == "gif":
        path = Path(args.infer).with_name(f"episode-seed{args.seed}.gif")
        path.write_bytes(gif_bytes(frames, 80))
        print(f"wrote {path}")
    kind = "greedy" if args.greedy else "sampled"
    print(f"an episode from the start of --seed {args.seed}, {kind}: return {total:.0f}")


# ======== 8  Command line =========================================================================


def threshold(args: argparse.Namespace) -> float:
    """The mean return at which gymnasium calls the environment solved."""
    return gym.spec(args.env_id).reward_threshold or 0.0


def number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number of this kind in low..high."""

    def parse(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return parse


def device_name(text: str) -> str:
    """An argparse type: auto, or a device that works here."""
    try:
        device = "cpu" if text == "auto" else text
        torch.rand(1, generator=torch.Generator(device), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ")[0].split(", ")[0]
        raise argparse.ArgumentTypeError(f"can't use {text} here: {reason}") from error
    return text


def checkpoint_path(text: str) -> str:
    """An argparse type: a readable checkpoint of this script."""
    return text if load_checkpoint(text) else ""


def build_parser() -> argparse.ArgumentParser:
    about, formatter = (__doc__ or "").splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=formatter)
    # differs: flags of branches
    natural, positive = number(int, 0), number(int, 1)
    unit, real = number(float, 0, 1), number(float, 0)
    switch: dict = {"action": argparse.BooleanOptionalAction, "default": False}

    # fmt: off
    flag = parser.add_argument_group("run").add_argument
    flag("--seed", type=number(int, 0, UNSEEN - 1), default=42,
         help="of networks, starts and actions; with --infer: which start")
    flag("--device", type=device_name, default="auto", help="auto (CUDA if here), cpu, cuda:N, mps")
    flag("--threads", type=natural, default=1,
         help="CPU threads; small networks gain nothing from more; 0: torch decides")
    flag("--run_name", "--version", help="name of the run; None: estimator, environment and seed")
    flag("--output_dir", default="runs", help=f"a run goes to OUTPUT_DIR/{SCRIPT}/RUN_NAME")
    flag("--max_steps", type=positive, default=5_000_000,
         help="stop after the update that reaches so many environment steps, branches included")
    flag("--save_steps", type=natural, default=1_000_000,
         help="environment steps per checkpoint; 0: only the last")
    flag("--eval_every", type=natural, default=20_000,
         help="environment steps per evaluation; 0: only the last")
    flag("--eval_episodes", type=positive, default=100,
         help="unseen episodes to evaluate on, greedy and sampled each")
    flag("--target_return", type=real,
         help="stop when both evaluations reach it; None: the environment's threshold; 0: never")
    flag("--resume", type=checkpoint_path, metavar="PATH", help="go on from a checkpoint, exactly")
    flag("--infer", type=checkpoint_path, metavar="PATH", help="judge the agent of a checkpoint")
    flag("--render", choices=["none", "human", "gif"], default="none", help="how --infer shows it")
    flag("--greedy", **switch, help="--render: most likely actions, not samples")
    flag("--detect_anomaly", **switch, help="torch's search for the origin of a NaN (slow)")
    flag("--quiet", **switch, help="no progress bar, no summary")

    flag = parser.add_argument_group("environment").add_argument
    flag("--env_id", choices=["CartPole-v0", "CartPole-v1"], default="CartPole-v1",
         help="200 steps at most and threshold 195, or 500 and 475")
    flag("--num_states", type=positive, default=32, help="S, states of an update, 16..128")
    flag("--visit_steps", type=positive, default=16,
         help="steps of the policy from one visited state to the next, 1..50")
    flag("--random_visits", type=unit, default=0.0,
         help="share of the visits' actions that are random, for states off the policy's path")
    flag("--group_size", type=number(int, 2), default=8, help="G, branches of a state, 2..32")
    flag("--horizon", type=positive,
         help="steps of a branch; None: 20, then half as many more whenever most groups are flat")
    flag("--grow_above", type=unit,
         help="share of flat groups above which the horizon grows; None: 0.7")
    flag("--reward", choices=["survival", "shaped"], default="survival",
         help="1 a step, or the article's: near the middle and upright")

    flag = parser.add_argument_group("algorithm").add_argument
    flag("--adv_estimator", choices=["grpo", "rloo", "none"], default="grpo",
         help="returns normalised in their group, less the others' mean, or as they are")
    flag("--gamma", type=unit, default=0.99, help="discount within a branch")
    flag("--learning_rate", type=unit, default=1e-3, help="of Adam, 3e-4..3e-3")
    flag("--k_epochs", type=positive, default=4, help="K, passes over a batch, 1..10")
    flag("--batch_size", type=positive, default=128, help="rows of a gradient step, 32..1024")
    flag("--clip_epsilon", type=real, default=0.2, help="epsilon of the clip; inf: no clip")
    flag("--entropy_coef", type=real, default=0.0, help="weight of the entropy bonus, 0..0.02")
    flag("--max_grad_norm", type=number(float, 1e-6), default=0.5,
         help="clips the gradient, 0.1..1; inf: no clipping")
    flag("--hidden_size", type=number(int, 1, 4096), default=64, help="units of both hidden layers")
    # fmt: on
    return parser


# what the command line may change of a checkpoint's flags
FREE = {"resume", "infer", "device", "threads", "quiet", "eval_episodes"}
RESUME_FREE = FREE | {"max_steps", "save_steps", "eval_every", "target_return", "detect_anomaly"}
INFER_FREE = FREE | {"render", "greedy", "seed", "env_id"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Flags, completed and checked: exit 2 with the flag's name where one can't work."""
    # differs: flags of branches
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.resume and args.infer:
        parser.error("argument --infer: not with --resume")
    if args.resume or args.infer:
        flag, free = ("resume", RESUME_FREE) if args.resume else ("infer", INFER_FREE)
        saved = load_checkpoint(args.resume or args.infer)
        config = saved["config"] | {"resume": None, "infer": None}
        if vars(args).keys() != config.keys():
            parser.error(f"argument --{flag}: was written by another version of {SCRIPT}.py")
        args = parser.parse_args(argv, argparse.Namespace(**config))  # what is given, on top
        for name, value in config.items():
            if name not in free and getattr(args, name) != value:
                parser.error(f"argument --{name}: the checkpoint has {value}")
        if args.resume:
            last = Path(args.resume).with_name("checkpoint-last.pt")
            done = saved["counters"][0]
            if last.exists() and load_checkpoint(str(last))["counters"][0] > done:
                parser.error(f"argument --resume: {last} is later; resume it, or copy the folder")
            if args.max_steps <= done:
                parser.error(f"argument --max_steps: {done} steps are done; give more")
        return args
    for name in ("render", "greedy"):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"argument --{name}: only with --infer")
    if args.run_name is None:
        args.run_name = f"{args.adv_estimator}-{args.env_id[-2:]}-seed{args.seed}"
    if args.run_name in ("", "..") or Path(args.run_name).name != args.run_name:
        parser.error("argument --run_name: give the name of one folder, not a path")
    if args.horizon and args.grow_above is not None:
        parser.error("argument --grow_above: not with --horizon, which fixes it")
    if args.horizon is None and args.grow_above is None:
        args.grow_above = 0.7
    if args.target_return is None:
        args.target_return = threshold(args)
    return args


def returns_line(result: dict, args: argparse.Namespace) -> str:
    """What the evaluation found."""
    return (
        f"mean return of {args.eval_episodes} unseen episodes each: greedy {result['greedy']:.1f}, "
        f"sampled {result['sampled']:.1f} (threshold {threshold(args):.0f})"
    )


def summary(result: dict, args: argparse.Namespace) -> str:
    """The last lines of a run."""
    # differs: what a flat run means
    run_dir = Path(result["run_dir"])
    lines = [
        returns_line(result, args),
        f"{'solved' if result['solved'] else 'not solved'} after {result['env_steps']:,} "
        f"environment steps, {result['updates']:,} updates: {result['train_seconds']:.1f} s of "
        f"training, {result['seconds']:.1f} s in all",
        f"{result['flat']:.0%} of the groups were flat; horizon {result['horizon']}; every step of "
        "every branch is counted",
    ]
    if result["flat"] == 1 and args.adv_estimator != "none":
        why = "give a longer --horizon" if args.gamma else "--gamma 0 counts only the first step"
        if result["horizon"] <= (1 if args.reward == "shaped" else 2):
            why = (
                "the first action changes no reward so soon, for CartPole moves x and theta with "
                "the old velocities; " + why
            )
        lines.append(f"all groups were flat, so nothing was learned: {why}")
    lines.append(f"logs: {run_dir}    watch: tensorboard --logdir {run_dir.parent.parent}")
    if result["stopped"]:
        lines.append(f"go on: python {SCRIPT}.py --resume {run_dir}/checkpoint-last.pt")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    # differs: one run
    args = parse_args(argv)
    try:
        if args.infer:
            infer(args)
            return 0
        result = train(args)
    except KeyboardInterrupt:
        print("stopped at once; checkpoints saved before are whole", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if not args.quiet:
        print(summary(result, args))
    return 130 if result["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
