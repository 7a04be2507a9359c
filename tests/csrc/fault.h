/* Ahead of every file of the build whose kernels, when told to, leave out a line of a slice or a round of multiply-adds. */
extern int test_fault;
#define MEMBENCH_TEST_FAULT test_fault
