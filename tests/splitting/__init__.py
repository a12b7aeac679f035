"""Tests of accumkernels.splitting."""
