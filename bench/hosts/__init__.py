"""Between hosts: the same work on farprop and on torch.distributed over links of given rates and delays."""
