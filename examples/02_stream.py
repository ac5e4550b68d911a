"""Stream an answer to a chat message; tokens that a drafter guessed are counted as they come.

python examples/02_stream.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams

QUESTION = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model)
    params = SamplingParams(temperature=0, max_tokens=48)
    prompt = llm.chat_ids([{"role": "user", "content": QUESTION}])

    num_guessed = num_tokens = 0
    for piece in llm.stream(prompt, params, speculative_config={"method": "ngram"}):
        print(piece.text, end="", flush=True)
        num_guessed += sum(piece.from_draft)
        num_tokens += len(piece.token_ids)
    print(f"\n\n{num_guessed} of {num_tokens} tokens were guessed by the drafter and confirmed by the model")


if __name__ == "__main__":
    main(*sys.argv[1:2])
