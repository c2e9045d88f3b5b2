"""Verbs that write model folders: export, merge, quantize"""

import os

from jaxtrain.arguments import Parser, expand_path


def run_export(argv: list[str]) -> None:
    """Write a checkpoint, or a Hugging Face folder anew, as a Hugging Face model folder."""
    parser = Parser("jaxtrain export", description=run_export.__doc__)
    parser.add_argument(
        "source", type=expand_path, help="a run's output_dir, a Hugging Face folder or a Hub id"
    )
    parser.add_argument("--output", type=expand_path, help="default, of a run: RUN/model")
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as loaded"
    )
    parser.add_argument("--max-shard-size", help="of a weights file: 500MB, 2GiB; default 5GB")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.export import export_command

    export_command(args.source, args.output, args.step, args.dtype, args.max_shard_size)


def run_merge(argv: list[str]) -> None:
    """Fold an adapter into the weights of its base: a full Hugging Face model folder."""
    parser = Parser("jaxtrain merge", description=run_merge.__doc__)
    parser.add_argument("source", type=expand_path, help="a run's output_dir or a PEFT folder")
    parser.add_argument(
        "--base", type=os.path.expanduser, help="folder or Hub id; default: what the adapter names"
    )
    parser.add_argument("--output", type=expand_path, help="default: SOURCE/merged")
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the base")
    parser.add_argument(
        "--quantize",
        choices=("none", "nf4", "nf4_fused", "int8", "mxfp4"),
        default="none",
        help="of a PEFT folder: adapter.quantize of its training (of Axolotl's with"
        " quantize_moe_experts: nf4_fused); a run knows its own",
    )
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.merge import merge_command

    merge_command(args.source, args.base, args.output, args.step, args.dtype, args.quantize)


def run_quantize(argv: list[str]) -> None:
    """Write a model with its matrices in fp8, int8 or int4 (compressed-tensors), as vLLM and
    transformers load it; with held-out loss before and after, of a run with eval data."""
    parser = Parser("jaxtrain quantize", description=run_quantize.__doc__)
    parser.add_argument(
        "source",
        type=expand_path,
        help="a run's output_dir, a Hugging Face or PEFT folder, or a Hub id",
    )
    parser.add_argument("--scheme", choices=("fp8", "int8", "int4"), required=True)
    parser.add_argument(
        "--group", type=int, default=128, help="of int4: numbers that share a scale (default 128)"
    )
    parser.add_argument(
        "--output", type=expand_path, help="default, of a run: RUN/quantized-SCHEME"
    )
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument("--base", help="of a PEFT folder: folder or Hub id it belongs to")
    parser.add_argument("--no-eval", action="store_true", help="do not compute held-out loss")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.quantize import quantize_command

    quantize_command(args)
