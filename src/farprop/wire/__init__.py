"""The format of messages, and the codecs between objects and buffers. No sockets, no threads."""
