"""Programs that use torch.distributed.rpc, run as they are on torch and on farprop."""
