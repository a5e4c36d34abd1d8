"""Objects and tensors to buffers and back. No sockets, no threads."""
