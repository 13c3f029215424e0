"""The `mlx_dspark` command group. Commands live beside the feature they expose and are loaded by name."""

from __future__ import annotations

import importlib

import click

from .commands import SETTINGS

_COMMANDS = {
    "generate": ("generate", "Write text with a target and its draft."),
    "convert": ("convert.command", "Convert a public draft checkpoint, or look at its facts."),
    "models": ("models", "List the targets whose drafts are known."),
    "doctor": ("doctor", "Look at this machine, and check that a draft works for its target."),
    "bench": ("bench", "Time plain mlx_lm, our plain loop and speculation on the same prompts."),
    "profile": ("profile", "Measure what a round costs on this machine."),
    "calibrate": ("calibrate", "Fit the draft's confidences to what the target accepts."),
    "train": ("train.command", "Train a draft for a target."),
    "evaluate": ("evaluate", "Measure how much of a draft's proposals the target keeps."),
    "data": ("data", "Let a target answer prompts: training data for its draft."),
    "server": ("server.command", "Serve a pair through OpenAI's HTTP interface."),
    "simulate": ("simulate", "Compare policies on cost curves of other machines."),
}


class LazyGroup(click.Group):
    """Lists stubs, so that help and spelling suggestions cost no import; runs the real command."""

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"mlx_dspark.{_COMMANDS[name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings=SETTINGS,
             commands={name: click.Command(name, short_help=text) for name, (_, text) in _COMMANDS.items()})
@click.version_option(package_name="mlx-dspark")
def main() -> None:
    """Speculative decoding with DSpark drafts on MLX: the same text, sooner."""


if __name__ == "__main__":
    main()
