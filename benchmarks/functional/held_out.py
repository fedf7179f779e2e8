"""Table 1 at the demo's scale: held-out questions through transformers and through every scheme of the engine. Greedy
answers must be the same; a difference is printed, not hidden.

    python -m benchmarks.functional.held_out [-n 500] [--schemes gllm rserve] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.demo_model.questions import Question, held_out, is_right
from benchmarks.functional.answers import SCHEMES, write
from gllm import LLM, SamplingParams
from gllm.config import DEMO_CHECKPOINT

MAX_TOKENS = 16
REFERENCE = "transformers"
SHOWN = 10  # differing answers that are printed and kept


def main(argv: Sequence[str] | None = None) -> int:
    """1 when a scheme answers otherwise than transformers."""
    args = parse(argv)
    questions = held_out(args.n, args.seed)
    dataset = f"held-out questions of the demo ({args.n})"
    reference: list[str] | None = None
    same = True
    for system in (REFERENCE, *args.schemes):
        begin = time.perf_counter()
        answers = ask_transformers(questions) if system == REFERENCE else ask(system, questions)
        seconds = time.perf_counter() - begin
        right = [is_right(q, a) for q, a in zip(questions, answers, strict=True)]
        reference = reference or answers
        differing = differences(questions, reference, answers)
        write(
            args.results, system, dataset, answers, right, seed=args.seed, config={"max_tokens": MAX_TOKENS},
            seconds=round(seconds, 1), differing=len(differing), shown=differing[:SHOWN],
        )  # fmt: skip
        print(f"{system:14}{100 * sum(right) / len(right):6.1f} % of {args.n} right, {len(differing)} differ, "
              f"{seconds:.0f} s", flush=True)  # fmt: skip
        print("\n".join(f"    {line}" for line in differing[:SHOWN]), end="\n" if differing else "")
        same = same and not differing
    return 0 if same else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=500, help="number of questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of result files")
    return parser.parse_args(argv)


def ask_transformers(questions: Sequence[Question]) -> list[str]:
    from benchmarks.demo_model.evaluate import Reference  # loads torch and transformers

    reference = Reference(DEMO_CHECKPOINT)
    return [reference.answer(question, MAX_TOKENS).strip() for question in questions]


def ask(scheme: str, questions: Sequence[Question]) -> list[str]:
    """All questions at once, so that the scheme batches, chunks and overlaps as it does under load. A question that
    failed has the reason for an answer."""
    with LLM(**SCHEMES[scheme]) as llm:
        outputs = llm.chat(
            [question.messages for question in questions],
            SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
            use_tqdm=False,
        )
    return [f"[{out.error}]" if out.error else out.outputs[0].text.strip() for out in outputs]


def differences(questions: Sequence[Question], wanted: Sequence[str], got: Sequence[str]) -> list[str]:
    """One line for each question that was answered otherwise."""
    return [
        f"question {number}, {question.kind}, {len(question.pictures)} pictures: {ours!r}, not {theirs!r}"
        for number, (question, theirs, ours) in enumerate(zip(questions, wanted, got, strict=True))
        if ours != theirs
    ]


if __name__ == "__main__":
    sys.exit(main())
