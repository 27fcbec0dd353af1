"""Figure 4 of Huang et al.: maps of the pretraining sentences, coloured by meta task, for several numbers of tasks.

    python benchmarks/map_prompts.py --data-dir DIR
    python benchmarks/map_prompts.py --data-dir DIR --values 3 30 --grouping lda

All other options are those of run_prompts.py; of several seeds the first one counts. No language model is read, only
the sentence encoder.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import ctrl_c  # noqa: F401
import run_prompts

from metapretrain.episodes.groups import group_agreement
from metapretrain.experiments.command import machine_of
from metapretrain.experiments.prompts.data import PromptInputs
from metapretrain.experiments.prompts.recipe import GROUPINGS
from metapretrain.files import write_file
from metapretrain.options import Parser, main_guard, positive_int
from metapretrain.report.figures import save_figure, tsne_figure

VALUES = (3, 6, 10)


def options_of(argv: Sequence[str] | None) -> tuple[Namespace, Namespace]:
    """Read the command line: the options here, and those of run_prompts.py."""
    parser = Parser(add_help=False)
    parser.add_argument("--values", nargs="+", type=positive_int, default=VALUES, metavar="K", help="(3 6 10)")
    parser.add_argument("--grouping", choices=GROUPINGS, default="kmeans", help="what makes the tasks (kmeans)")
    parser.add_argument("--points", type=positive_int, default=1000, metavar="N", help="drawn in a panel (1000)")
    own, rest = run_prompts.own_options(parser, __doc__, argv)
    return own, run_prompts.options_of(["--methods", "metapt-kmeans", "--sets", "sst5", "--seeds", "0", *rest])


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Group the sentences for each number of tasks, draw them, and print sizes and agreement with the labels."""
    own, options = options_of(argv)
    recipe, machine = run_prompts.recipe_of(options), machine_of(options)
    recipes = {k: replace(recipe, meta=replace(recipe.meta, clusters=k)) for k in own.values}
    data = run_prompts.data_of(options, recipe)
    if options.dry_run:
        print(f"maps of {len(data.pretraining):,} sentences in {', '.join(map(str, recipes))} tasks by {own.grouping}")
        return 0
    z, labels = PromptInputs(recipe, data, machine).features("labelled"), data.pretraining.require_labels()
    panels, lines = {}, ["| K | agreement with the labels (NMI) | rows of the tasks |", "| ---: | ---: | --- |"]
    for k, changed in recipes.items():
        inputs = PromptInputs(changed, data, machine, options.cache, features={"labelled": z})
        groups = inputs.groups(own.grouping, "labelled", options.seeds[0])
        sizes = sorted(groups.bincount().tolist(), reverse=True)
        panels[f"K = {k}"] = z, groups
        lines.append(f"| {k} | {group_agreement(groups, labels):.3f} | {', '.join(f'{size:,}' for size in sizes)} |")
    figure = tsne_figure(panels, [f"task {k}" for k in range(max(own.values))], max_points=own.points)
    values = () if tuple(recipes) == VALUES else recipes  # another choice is another file
    name = "-".join(filter(None, ["map", own.grouping, *map(str, values), options.tag, "smoke" * options.smoke]))
    place = options.out / "prompts" / f"{name}.png"
    print("\n".join(lines))
    print(f"table    {write_file(place.with_suffix('.md'), chr(10).join(lines) + chr(10))}")
    print(f"figure   {save_figure(figure, place)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
