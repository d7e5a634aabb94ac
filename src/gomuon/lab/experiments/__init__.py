"""What is trained and compared: models, tasks, optimizers, and plans declared beforehand."""
