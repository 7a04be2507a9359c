/* The plain loops that people compare with: STREAM's four kernels over OpenMP threads, left to the compiler.
 *
 * Usage: stream_loop ELEMENTS PASSES
 * Prints one line for each kernel: its name, credited bytes of a pass, then the seconds of every pass, the first included.
 */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

static double *allocate(size_t n)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, n * sizeof(double)) != 0)
        exit(2);
    return p;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const size_t n = strtoull(argv[1], NULL, 10);
    const int passes = atoi(argv[2]);
    double *a = allocate(n), *b = allocate(n), *c = allocate(n);
    const double s = 3.0;
    const char *names[] = {"copy", "scale", "add", "triad"};
    const size_t arrays[] = {2, 2, 3, 3};

#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) {
        a[i] = 1.0;
        b[i] = 2.0;
        c[i] = 0.0;
    }
    for (int k = 0; k < 4; k++) {
        printf("%s %zu", names[k], arrays[k] * n * sizeof(double));
        for (int pass = 0; pass < passes; pass++) {
            const double start = omp_get_wtime();
            switch (k) {
            case 0:
#pragma omp parallel for schedule(static)
                for (size_t i = 0; i < n; i++)
                    c[i] = a[i];
                break;
            case 1:
#pragma omp parallel for schedule(static)
                for (size_t i = 0; i < n; i++)
                    b[i] = s * c[i];
                break;
            case 2:
#pragma omp parallel for schedule(static)
                for (size_t i = 0; i < n; i++)
                    c[i] = a[i] + b[i];
                break;
            default:
#pragma omp parallel for schedule(static)
                for (size_t i = 0; i < n; i++)
                    a[i] = b[i] + s * c[i];
            }
            printf(" %.9f", omp_get_wtime() - start);
        }
        printf("\n");
    }
    /* The results are used, so that no loop is left out. */
    fprintf(stderr, "%g\n", a[n / 2] + b[n / 3] + c[n / 5]);
    free(a);
    free(b);
    free(c);
    return 0;
}
