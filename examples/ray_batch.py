"""Parquet in, Parquet out, on all machines of a Ray cluster: each actor has the model once.

    pip install 'lfmfast[hub,ray]'
    python ray_batch.py reviews.parquet answers/ --template "Summarize: {review}"
    python ray_batch.py reviews/ answers/ --prompt-column review --model LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M --actors 8

It runs on the cluster that RAY_ADDRESS names, or on this machine alone.
"""

from __future__ import annotations

import argparse

import ray

from lfmfast.ray import LFM2Predictor, resources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="Parquet file or folder")
    parser.add_argument("output", help="folder for Parquet files")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompt-column", help="column that is the prompt; without it and --template: messages or prompt")
    which.add_argument("--template", help="the prompt, with names of columns in braces")
    parser.add_argument("--model", default="demo", help="GGUF file, or a name on the Hugging Face Hub")
    parser.add_argument("--actors", type=int, default=1, help="copies of the model")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each actor")
    parser.add_argument("--batch-size", type=int, default=256, help="rows that an actor takes at a time")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    rows = ray.data.read_parquet(args.input)
    if rows.count() > args.batch_size:  # a small file comes as one block, which only one actor would get
        rows = rows.repartition(target_num_rows_per_block=args.batch_size)
    answers = rows.map_batches(
        LFM2Predictor,
        fn_constructor_kwargs={"model": args.model, "prompt_column": args.prompt_column, "template": args.template,
                               "max_tokens": args.max_tokens, "seed": args.seed},
        batch_size=args.batch_size,
        batch_format="pyarrow",
        **resources(args.actors, num_gpus=args.gpus),
    )  # fmt: skip
    answers.write_parquet(args.output)


if __name__ == "__main__":
    main()
