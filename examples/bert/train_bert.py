"""Masked-language-model training of a BERT in plain PyTorch: one process, fp32. See README.md.

python train_bert.py --checkpoint_dir experiments --num_iterations 1000 --local_rank 0 --log_every 500
"""

import mlm
import torch


def main() -> None:
    args = mlm.parse_arguments("BERT in plain PyTorch")
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", max(args.local_rank, 0)) if has_gpu else torch.device("cpu")

    corpus = mlm.Corpus(args.max_seq_length)
    model = mlm.create_model(args, corpus.vocabulary_size)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    start_step = 0
    if args.load_checkpoint_dir:
        newest = max(args.load_checkpoint_dir.glob("checkpoint.iter_*.pt"), key=step_of)
        state_dict = torch.load(newest, map_location=device)
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optimizer"])
        start_step = step_of(newest) + 1
        print(f"going on after step {start_step} of {newest}", flush=True)

    model.train()
    log = mlm.Log(args.log_every)
    data_iterator = corpus.batches(args.batch_size, args.mask_prob, start_step)
    for step, batch in enumerate(data_iterator, start=start_step):
        if step >= args.num_iterations:
            break
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss)
        if args.checkpoint_dir and (step + 1) % args.checkpoint_every == 0:
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(obj=state_dict, f=str(args.checkpoint_dir / f"checkpoint.iter_{step}.pt"))


def step_of(path):
    """The step in a checkpoint's name."""
    return int(path.stem.rpartition("_")[2])


if __name__ == "__main__":
    main()
