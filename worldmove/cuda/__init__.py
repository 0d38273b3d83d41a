"""GPU memory as descriptors: the same pages in every process that holds one."""
