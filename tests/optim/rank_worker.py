"""One rank of the multi-process tests: updates, then saves what this rank must write and all it knows.

Started by `test_optimizer.py` through `runpy.run_path` with `JOB` in the globals.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main(job: dict[str, Any]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import toy

    torch.set_num_threads(1)
    folder, rank, world_size = Path(job["folder"]), job["rank"], job["world_size"]
    is_cuda = job["backend"] == "nccl"
    device = f"cuda:{rank}" if is_cuda else "cpu"
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(job["backend"], init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        parameters = toy.make_parameters(device)
        # fp32 products on every device, so that results can be compared.
        optimizer = toy.make_optimizer(
            parameters,
            rank=rank,
            world_size=world_size,
            compute_dtype=torch.float32,
            muon_round_bytes=job["round_bytes"],
        )
        if job["load"]:
            saved = torch.load(job["load"])
            for name, parameter in parameters.items():
                parameter.data.copy_(saved["parameters"][name])
            optimizer.load_state(saved["state"].__getitem__)
            optimizer.num_updates_done = job["start"]
        toy.run_updates(optimizer, parameters, job["start"], job["stop"])
        result = {
            "parameters": {name: parameter.detach().cpu() for name, parameter in parameters.items()},
            "state": {key: tensor.cpu().clone() for key, tensor in optimizer.state_tensors().items()},
            "kept": optimizer.state_keys(),
            "writers": optimizer.writers(),
            "rates": optimizer.learning_rates(job["stop"] - 1),
        }
        torch.save(result, folder / f"rank_{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


main(globals()["JOB"])
