"""Starting workers: ``farprop run``, local workers for scripts and notebooks, and Ray."""
