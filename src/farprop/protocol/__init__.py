"""State machines: each event is a method call that returns actions to perform. No sockets, threads or clocks."""
