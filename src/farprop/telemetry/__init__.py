"""What a worker does, for the tools that watch over programs: Prometheus and OpenTelemetry, torch's debug server.

``farprop.telemetry.prometheus`` needs the extra ``metrics``, ``farprop.telemetry.opentelemetry`` the extra ``otel``.
Each starts when the program says so, and costs nothing before.
"""
