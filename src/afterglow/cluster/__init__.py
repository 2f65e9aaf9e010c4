"""Replicas on several machines with Ray Serve: `deployment` builds the application. Needs the extra `ray`."""

from afterglow.cluster.application import build, deployment

__all__ = ["build", "deployment"]
