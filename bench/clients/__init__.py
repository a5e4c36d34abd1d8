"""Unchanged programs that use torch.distributed.rpc, run on torch and on farprop."""
