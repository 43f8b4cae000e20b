"""`python -m mindformers_core train | data | generate | verify | diff | compare | recovery | inspect | …`."""

import argparse
import os
import signal
import sys
from functools import partial

from mindformers_core.commands.compare import compare_runs
from mindformers_core.commands.ending import end_by

_DESCRIPTION = "Train Llama-style models from a YAML recipe, on a mesh, and generate with them."


def main(arguments=None):
    """Run one command; returns the exit code: 0 done, 1 runs that differ, 130 interrupted, 141 not read.

    That of an error is as of `end_by`.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(arguments)
    if "overrides" in arguments:  # argparse collects consecutive ones only
        arguments.overrides += [text for text in rest if not text.startswith("-")]
        rest = [text for text in rest if text.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # the reader, as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        return end_by(error)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m mindformers_core", description=_DESCRIPTION)
    metavar = "train | data | generate | verify | diff | compare | recovery | inspect | check | convert"
    commands = parser.add_subparsers(required=True, metavar=metavar)
    recipe = argparse.ArgumentParser(add_help=False)
    recipe.add_argument("--config", required=True, metavar="FILE", help="the recipe, as configs/llama_tiny_cpu.yaml")
    changed = argparse.ArgumentParser(add_help=False)
    changed.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to exchange")

    def command(name, run, text, *parents):
        made = commands.add_parser(name, help=text, parents=parents)
        made.set_defaults(run=run)
        return made.add_argument

    add = command("train", _train, "train, or with --dry-run show what would be trained", recipe, changed)
    add("--dry-run", action="store_true", help="check and count on the meta device; nothing is allocated")
    command("data", _data, "what the recipe's data are, and their first samples", recipe, changed)
    add = command("generate", _generate, "continue prompts with the weights of checkpoint.load_path", recipe, changed)
    add("--prompt", action="append", default=[], metavar="TEXT", help="a text; may be repeated")
    add("--prompts", metavar="FILE", help="a file with a prompt on every line")
    add("--tokens", type=_count, default=64, help="how many to generate, at most (default 64)")
    add("--temperature", type=float, help="of the draws; 0: the likeliest token (default: generation_config.json or 0)")
    add("--top-p", type=float, help="draw among tokens of this probability (default: as well, or 1)")
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--batch", type=_count, default=8, help="prompts that are continued together (default 8)")
    add("--tokenizer", default="", metavar="FILE", help="a tokenizer.json, or bytes")
    text = "run one step of all ranks in this process, and compare it with one card"
    add = command("verify", _verify, text, recipe, changed)
    add("--full", action="store_true", help="at the recipe's own sizes; default: the least that have its plan")
    add = command("compare", _compare, "the largest relative difference of two runs' losses")
    add("run_a", metavar="RUN_A", help="a run folder")
    add("run_b", metavar="RUN_B", help="another")
    add("--threshold", type=float, default=1e-4, help="exit code 1 above this (default 1e-4)")
    text = "also exit code 1 where the mean of the last 10 losses is not below this part of the first (as 0.7)"
    add("--fell", type=float, metavar="PART", help=text)
    add = command("diff", _diff, "the first operator whose result differs between two runs")
    add("run_a", metavar="A", help="a recipe, which is run on simulated ranks, or a recorded run's folder")
    add("run_b", metavar="B", help="another")
    add("--steps", type=_count, default=2, help="how many steps of a recipe are run (default 2)")
    add("--keep", metavar="FOLDER", help="keep there what recipes record")
    add("--perturbed", metavar="FOLDER", help="A's run, recorded with monitor.perturb=1")
    add("overrides", nargs="*", metavar="section.key=value", help="keys of both recipes; a:… or b:… of one")
    add = command("recovery", _recovery, "what failures cost a job, and the best interval between its checkpoints")
    for flag, (text, options) in _RECOVERY.items():
        add(f"--{flag}", help=text, **options)
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("folder", metavar="FOLDER", help="a checkpoint, or a run folder: its newest one")
    command("inspect", partial(_look_at, "inspect"), "the tensors of a checkpoint as a table, and its state", folder)
    command("check", partial(_look_at, "check"), "read a checkpoint, and compare it with its checksums", folder)
    add = command("convert", _convert, "a checkpoint to MindSpore's file or back, or to weights alone")
    add("source", metavar="SOURCE", help="FOLDER, a checkpoint or a run, or FILE.ckpt")
    add("target", metavar="TARGET", help="FILE.ckpt, or FOLDER, which doesn't exist yet")
    add("--config", metavar="FILE", help="the recipe of the model")
    add("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to exchange")
    return parser


def _count(text):
    """A number of steps, tokens or prompts."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 on")
    return int(text)


_RECOVERY = {  # flag: help, other arguments of add_argument; times are texts
    "simulate": ("draw failures, and count what they cost", {"action": "store_true", "required": True}),
    "mtbf": ("mean time between failures of the job, as 6h; seconds without a unit", {"required": True}),
    "workers": ("--mtbf is that of one of so many", {"type": _count, "default": 1}),
    "run": ("take step, save and background from this run", {"dest": "measured", "metavar": "FOLDER"}),
    "step": ("time of a step", {}),
    "save": ("time that a save holds up training", {}),
    "background": ("time from there until the checkpoint is complete (default 0)", {}),
    "restart": ("time from a failure to the begin of the first new step, without loading", {"required": True}),
    "load": ("time of loading a checkpoint from disk (default 0)", {}),
    "from_disk": ("part of the failures after which the state isn't in memory (default 1)", {"type": float}),
    "preempted": ("mean time between preemptions, before which the job saves (default: none)", {}),
    "json": ("all figures, in seconds and parts of the wall time", {"action": "store_true"}),
}


# What commands do: each returns the exit code (None: 0).
def _train(arguments):
    from mindformers_core.recipe.loader import load_recipe

    recipe = load_recipe(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from mindformers_core.commands.dry_run import dry_run

        print(dry_run(recipe))
        return 0
    from mindformers_core.trainer.trainer import Trainer

    trainer = Trainer(recipe)
    summary = trainer.run()
    if trainer.rank == 0 and summary is not None:
        print(summary)
    return 0


def _data(arguments):
    from mindformers_core.commands.data_report import data_report
    from mindformers_core.recipe.loader import load_recipe

    print(data_report(load_recipe(arguments.config, arguments.overrides)))


def _generate(arguments):
    from mindformers_core.commands.generating import generate, read_prompts
    from mindformers_core.recipe.loader import load_recipe

    prompts = arguments.prompt + (read_prompts(arguments.prompts) if arguments.prompts else [])
    keys = ("temperature", "top_p", "seed")
    given = {key: value for key in keys if (value := getattr(arguments, key)) is not None}
    options = arguments.tokens, given, arguments.batch, arguments.tokenizer
    texts, rank = generate(load_recipe(arguments.config, arguments.overrides), prompts, *options)
    if rank == 0:
        print("\n\n".join(texts))


def _verify(arguments):
    from mindformers_core.commands.verifying import verify_recipe
    from mindformers_core.communication.simulated import Desync
    from mindformers_core.communication.world import compute_in_one_thread
    from mindformers_core.recipe.loader import load_recipe

    compute_in_one_thread()
    try:
        check = verify_recipe(load_recipe(arguments.config, arguments.overrides), arguments.full)
    except Desync as error:
        print(f"a fault: {error}")
        return 1
    print(check.report())
    return 1 if check.faults else 0


def _compare(arguments):
    return 0 if compare_runs(arguments.run_a, arguments.run_b, arguments.threshold, arguments.fell) else 1


def _diff(arguments):
    from mindformers_core.commands.diffing import diff

    sources = arguments.run_a, arguments.run_b
    return 0 if diff(sources, arguments.overrides, arguments.steps, arguments.keep, arguments.perturbed) else 1


def _recovery(arguments):
    from mindformers_core.commands.recovering import recovery

    print(recovery(arguments))


def _look_at(function, arguments):
    from mindformers_core.checkpoint import inspection

    print(getattr(inspection, function)(arguments.folder))


def _convert(arguments):
    from mindformers_core.recipe.loader import load_recipe
    from mindformers_core.trainer.checkpoints import convert

    recipe = load_recipe(arguments.config, arguments.overrides) if arguments.config else None
    print(convert(arguments.source, arguments.target, recipe))
