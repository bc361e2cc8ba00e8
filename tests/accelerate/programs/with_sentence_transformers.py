"""A program written for sentence-transformers: it learns which sentences are alike, and prints what came out."""

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from small_models import texts, tokenizer
from torch.utils.data import SequentialSampler
from transformers import BertConfig, BertModel, set_seed


def write_bert(folder: Path) -> None:
    set_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def in_order(dataset: Dataset, batch_size: int, drop_last: bool, **more: Any) -> DefaultBatchSampler:
    return DefaultBatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last, **more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loss", default="CosineSimilarityLoss")
    options = parser.parse_args()
    arguments = Arguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        batch_sampler=in_order,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    base = options.folder / "base"
    with arguments.main_process_first():
        if arguments.process_index == 0:
            write_bert(base)
    transformer = Transformer(str(base))
    model = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
    first, second = texts(22), texts(22)[::-1]
    columns = {"sentence1": first, "sentence2": second, "score": [place % 3 / 2 for place in range(22)]}
    if options.loss != "CosineSimilarityLoss":
        del columns["score"]
    data = Dataset.from_dict(columns)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(9)),
        loss=getattr(losses, options.loss)(model),
        evaluator=EmbeddingSimilarityEvaluator(first[:9], second[:9], [place % 3 / 2 for place in range(9)]),
    )
    trainer.train()
    kept = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second", "flos"))}
        for entry in trainer.state.log_history
    ]
    embedded = float(abs(model.encode(first[:5])).sum())
    if trainer.is_world_process_zero():
        print("FOUND", json.dumps({"history": kept, "embedded": embedded}))


if __name__ == "__main__":
    main()
