"""MMMU (validation) from a local copy, with a real checkpoint: through the engine in this process, scheme by scheme, or
through any OpenAI-compatible server. Writes result files for Table 1.

    python -m benchmarks.functional.mmmu DATA --model-path DIR [--schemes gllm rserve]
    python -m benchmarks.functional.mmmu DATA --url http://127.0.0.1:8000 --system vllm

DATA: see `mmmu_data`. The prompt is MMMU's: the question with its images in place, the options with letters, and one
sentence that asks for the letter (or for a word or phrase). Decoding is greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
from PIL import Image

from benchmarks import results
from benchmarks.functional.answers import SCHEMES, write
from benchmarks.functional.mmmu_answers import is_right
from benchmarks.functional.mmmu_data import LETTERS, PLACEHOLDER, Question, load
from benchmarks.real.client import check_url
from gllm import LLM, SamplingParams

DATASET = "MMMU val"
CHOOSE = "Answer with the option's letter from the given choices directly."
PHRASE = "Answer the question using a single word or phrase."
CONCURRENCY = 32

Message = dict[str, Any]
MakePart = Callable[[Image.Image], Message]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        questions = load(args.data)[: args.limit]
        if args.url:
            said = {args.system: ask_server(check_url(args.url, args.allow_host), questions, args)}
        else:
            said = {scheme: ask_engine(scheme, questions, args) for scheme in args.schemes}
    except (ValueError, openai.OpenAIError) as error:
        print(f"mmmu: {error}", file=sys.stderr)
        return 1
    for system, answers in said.items():
        report(system, questions, answers, args)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the questions")
    parser.add_argument("--model-path", help="checkpoint folder (default: the demo, which knows nothing of MMMU)")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--url", help="ask this server instead, without /v1")
    parser.add_argument("--allow-host", action="append", default=[], help="a host other than this machine")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--system", default="server", help="the name of that server in results")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of result files")
    return parser.parse_args(argv)


# ---- prompts ------------------------------------------------------------------------------------------------------


def prompt_text(question: Question) -> str:
    """With image placeholders still in it."""
    if not question.options:
        return f"{question.text}\n\n{PHRASE}"
    choices = "\n".join(f"({LETTERS[i]}) {option}" for i, option in enumerate(question.options))
    return f"{question.text}\n\n{choices}\n\n{CHOOSE}"


def messages(question: Question, part_of: MakePart) -> list[Message]:
    """One user turn: text, and each image where it is named first; one that is not named stands in front."""
    pieces = PLACEHOLDER.split(prompt_text(question))
    named = {int(number) for number in pieces[1::2]}
    parts = [part_of(image) for number, image in question.images.items() if number not in named]
    seen: set[int] = set()
    for position, piece in enumerate(pieces):
        if position % 2 == 0:
            if piece.strip():
                parts.append({"type": "text", "text": piece})
        elif int(piece) not in seen:
            seen.add(int(piece))
            parts.append(part_of(question.images[int(piece)]))
        else:
            parts.append({"type": "text", "text": f"<image {piece}>"})
    return [{"role": "user", "content": parts}]


def as_picture(image: Image.Image) -> Message:
    return {"type": "image", "image": image}


def as_data_url(image: Image.Image) -> Message:
    """Lossless, so that every system sees the same pixels."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()},
    }


# ---- asking -------------------------------------------------------------------------------------------------------


def ask_engine(scheme: str, questions: Sequence[Question], args: argparse.Namespace) -> list[str]:
    with LLM(args.model_path, **SCHEMES[scheme]) as llm:
        outputs = llm.chat(
            [messages(question, as_picture) for question in questions],
            SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
        )
    return [f"[{out.error}]" if out.error else out.outputs[0].text for out in outputs]


def ask_server(url: str, questions: Sequence[Question], args: argparse.Namespace) -> list[str]:
    """Raises openai.OpenAIError when the server does not answer at all; a question that it refuses is a wrong one."""

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=args.api_key, timeout=600.0) as api:
            model = (await api.models.list()).data[0].id
            places = asyncio.Semaphore(CONCURRENCY)

            async def one(question: Question) -> str:
                async with places:
                    try:
                        answer = await api.chat.completions.create(
                            model=model,
                            messages=messages(question, as_data_url),  # type: ignore[arg-type]
                            max_tokens=args.max_tokens,
                            temperature=0.0,
                        )
                    except openai.APIStatusError as error:
                        return f"[{error}]"
                return answer.choices[0].message.content or ""

            return list(await asyncio.gather(*map(one, questions)))

    return asyncio.run(all_of_them())


# ---- scores -------------------------------------------------------------------------------------------------------


def by_subject(questions: Sequence[Question], right: Sequence[bool]) -> dict[str, dict[str, float]]:
    """Questions and accuracy of each subject, in order of names."""
    groups: dict[str, list[bool]] = {}
    for question, is_good in zip(questions, right, strict=True):
        groups.setdefault(question.subject, []).append(is_good)
    return {name: {"questions": len(g), "accuracy": sum(g) / len(g)} for name, g in sorted(groups.items())}


def report(system: str, questions: Sequence[Question], said: Sequence[str], args: argparse.Namespace) -> None:
    right = [is_right(question, answer) for question, answer in zip(questions, said, strict=True)]
    subjects = by_subject(questions, right)
    config = {"max_tokens": args.max_tokens, "model": Path(args.model_path).name if args.model_path else None}
    answers = [answer.strip() for answer in said]
    write(args.results, system, DATASET, answers, right, seed=0, config=config, subjects=subjects, said=answers)
    overall = sum(right) / len(right)
    print(json.dumps({"system": system, "dataset": DATASET, "questions": len(right), "accuracy": overall, **subjects}))


if __name__ == "__main__":
    sys.exit(main())
