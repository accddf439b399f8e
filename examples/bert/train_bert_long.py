"""The same training on long sequences: sparse attention, and a length that grows with the step. See README.md.

deepspeed train_bert_long.py --max_seq_length 4096 --batch_size 1 --num_iterations 1000 --log_every 100
"""

import mlm

import deepspeed
import deepspeed.comm as dist
from deepspeed.data.curriculum import shortened


def main() -> None:
    args = mlm.parse_arguments("BERT with sparse attention and a curriculum")
    deepspeed.init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    corpus = mlm.Corpus(args.max_seq_length)
    model = mlm.create_model(args, corpus.vocabulary_size)
    ds_config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "sparse_attention": {
            "apply_to": "model",
            "mode": "bigbird",
            "block": 64 if args.max_seq_length >= 1024 else 16,
            "num_random_blocks": 1,
        },
        "curriculum_learning": {
            "enabled": True,
            "min_difficulty": max(args.max_seq_length // 8, 8),
            "max_difficulty": args.max_seq_length,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": max(args.num_iterations // 2, 1), "difficulty_step": 8},
        },
    }
    model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)

    start_step = 0
    if args.load_checkpoint_dir:
        newest, client_state = model.load_checkpoint(load_dir=args.load_checkpoint_dir)
        if newest is None:
            raise SystemExit(f"{args.load_checkpoint_dir} has no checkpoint")
        start_step = client_state["checkpoint_step"] + 1

    model.train()
    log = mlm.Log(args.log_every, is_first=rank == 0)
    data_iterator = corpus.batches(args.batch_size, args.mask_prob, start_step, rank, world_size)
    for step, batch in enumerate(data_iterator, start=start_step):
        if step >= args.num_iterations:
            break
        length = model.curriculum_scheduler_legacy.get_current_difficulty()
        batch = {name: tensor.to(model.device) for name, tensor in shortened(batch, length).items()}
        loss = model(**batch).loss
        model.backward(loss)
        model.step()
        log(step, loss)
        if rank == 0 and (step + 1) % args.log_every == 0:
            print(f"step {step + 1:6d}  length {length}", flush=True)
        if args.checkpoint_dir and (step + 1) % args.checkpoint_every == 0:
            model.save_checkpoint(save_dir=args.checkpoint_dir, client_state={"checkpoint_step": step})


if __name__ == "__main__":
    main()
