"""The verb sweep"""

import os

from jaxtrain.arguments import Parser, expand_path


def run_sweep(argv: list[str]) -> int:
    """Train one config many times with other values of some keys, as SWEEP.toml says; tell which
    were best. The same command again goes on where it stopped."""
    parser = Parser("jaxtrain sweep", description=run_sweep.__doc__)
    parser.add_argument("file", type=expand_path, help="SWEEP.toml, .yaml or .json; Axolotl's, too")
    parser.add_argument("--config", type=os.path.expanduser, help="default: sweep.config of it")
    parser.add_argument("--output", type=os.path.expanduser, help="default: sweep.output_dir of it")
    parser.add_argument("--jobs", type=int, help="runs at once; default: sweep.jobs of the file")
    parser.add_argument(
        "--print", action="store_true", help="print the command of each trial, and start none"
    )
    parser.add_argument("--retry", action="store_true", help="try the failed trials once more")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.config.parse import read_table
    from jaxtrain.runs.sweep.axolotl import convert_sweep, is_axolotl
    from jaxtrain.runs.sweep.run import sweep_command
    from jaxtrain.runs.sweep.space import check_sweep

    table = read_table(args.file)
    if is_axolotl(table):
        table = convert_sweep(table)
    options = {"config": args.config, "output_dir": args.output, "jobs": args.jobs}
    file = check_sweep(table, str(args.file), **options)
    return sweep_command(file, show_only=args.print, retry=args.retry)
