/*
 * The first process of a virtual machine with two memory nodes and four CPUs, two on each: runs the reader on some CPUs and
 * tells on which node the pages of its arrays lie. One line for each set of CPUs: `cpus N0 N1`, in pages of 4 KiB.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <unistd.h>

#include "membench.h"

#define ARRAY_BYTES (24u << 20)
#define PASSES 3

/* Pages on each node of the largest anonymous mapping: the arrays are by far the largest. */
static void largest_mapping(long node[2])
{
    FILE *maps = fopen("/proc/self/numa_maps", "r");
    char line[1024];
    node[0] = node[1] = 0;
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        const char *n0 = strstr(line, " N0="), *n1 = strstr(line, " N1=");
        const long here[2] = {n0 != NULL ? atol(n0 + 4) : 0, n1 != NULL ? atol(n1 + 4) : 0};
        if (here[0] + here[1] > node[0] + node[1])
            memcpy(node, here, sizeof here);
    }
    if (maps != NULL)
        fclose(maps);
}

static void measure(const char *name, const int32_t *cpus, int32_t threads)
{
    membench *bench = NULL;
    membench_pass passes[PASSES];
    int32_t completed = 0, cancel = 0;
    int error = membench_open(&bench, ARRAY_BYTES / sizeof(double), 0, cpus, threads);
    if (error == MEMBENCH_OK)
        error = membench_run(bench, MEMBENCH_READ, MEMBENCH_ISA_SCALAR, MEMBENCH_STORE_PLAIN, MEMBENCH_METHOD_STREAM, PASSES,
                             0.001, 10.0, &cancel, passes, &completed);
    long node[2];
    largest_mapping(node);
    printf("RESULT %s error=%d passes=%d unpinned=%d N0=%ld N1=%ld\n", name, error, completed, membench_unpinned(bench), node[0],
           node[1]);
    fflush(stdout);
    membench_close(bench);
}

int main(void)
{
    static const int32_t CPUS[] = {0, 1, 2, 3};
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    measure("all", CPUS, 4);
    measure("first", CPUS, 2);
    measure("second", CPUS + 2, 2);
    reboot(RB_POWER_OFF);
    return 0;
}
