"""Copy from text of your own: a corpus is built once, lies on disk, and every request may copy from it.

python examples/12_corpus.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.draft.corpus_build import build, find_files

HERE = Path(__file__).parent


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model)
    with tempfile.TemporaryDirectory() as folder:
        # The same as: paceline corpus build examples -o own.corpus --model MODEL
        corpus = build(find_files([HERE]), llm.tokenizer, Path(folder) / "own.corpus", name=model)
        print(f"{corpus.about.num_tokens} tokens of {corpus.about.num_documents} files, {corpus.num_bytes} bytes")

        prompt = "\n".join((HERE / "01_generate.py").read_text(encoding="utf-8").splitlines()[:8])
        params = SamplingParams(temperature=0, max_tokens=64)
        passes = {}
        for name, config in (("with", {"method": "suffix", "corpus": corpus}), ("without", {"method": "suffix"})):
            out = llm.generate([prompt], params, speculative_config=config)[0]
            passes[name] = out.stats.num_target_passes
        plain = llm.generate([prompt], params, speculative_config=None)[0]
        print(out.text)
        print(f"{passes['with']} passes with the corpus, {passes['without']} without")
        print(f"same text without speculation: {out.text == plain.text}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
