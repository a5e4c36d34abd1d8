"""State machines: events in, decisions out. No sockets, threads or clocks here."""
