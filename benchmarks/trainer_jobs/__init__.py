"""One job in each trainer, as it is written there, and as the task that its plan is found for."""
