"""The same training with DeepSpeed: any number of ranks, fp16, ZeRO stage 1, Adam on the CPU. See README.md.

deepspeed train_bert_ds.py --checkpoint_dir experiments --num_iterations 1000 --log_every 500
"""

import mlm

import deepspeed
import deepspeed.comm as dist


def main() -> None:
    args = mlm.parse_arguments("BERT with DeepSpeed")
    deepspeed.init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    corpus = mlm.Corpus(args.max_seq_length)
    model = mlm.create_model(args, corpus.vocabulary_size)
    ds_config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)

    start_step = 0
    if args.load_checkpoint_dir:
        newest, client_state = model.load_checkpoint(load_dir=args.load_checkpoint_dir)
        if newest is None:
            raise SystemExit(f"{args.load_checkpoint_dir} has no checkpoint")
        start_step = client_state["checkpoint_step"] + 1
        if rank == 0:
            print(f"going on after step {start_step} of {newest}", flush=True)

    model.train()
    log = mlm.Log(args.log_every, is_first=rank == 0)
    data_iterator = corpus.batches(args.batch_size, args.mask_prob, start_step, rank, world_size)
    for step, batch in enumerate(data_iterator, start=start_step):
        if step >= args.num_iterations:
            break
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        model.backward(loss)
        model.step()
        log(step, loss)
        if args.checkpoint_dir and (step + 1) % args.checkpoint_every == 0:
            model.save_checkpoint(save_dir=args.checkpoint_dir, client_state={"checkpoint_step": step})


if __name__ == "__main__":
    main()
