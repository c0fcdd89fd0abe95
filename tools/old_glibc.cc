// Linked by `make wheel` into the C++ operators and the compiler's C++ library, which then need glibc 2.14 and no newer:
// functions that glibc moved or changed since are taken in their first version, which every glibc for x86-64 has.
#include <dlfcn.h>
#include <pthread.h>

// Define a function that calls the same one of the first glibc for x86-64.
#define AS_OF_OLD(result, name, parameters, arguments)                   \
  extern "C" result old_##name parameters;                               \
  __asm__(".symver old_" #name "," #name "@GLIBC_2.2.5");                \
  extern "C" result name parameters noexcept { return old_##name arguments; }

AS_OF_OLD(void*, dlopen, (const char* path, int mode), (path, mode))
AS_OF_OLD(void*, dlsym, (void* library, const char* symbol), (library, symbol))
AS_OF_OLD(char*, dlerror, (), ())
AS_OF_OLD(int, pthread_once, (pthread_once_t * once, void (*run)()), (once, run))
AS_OF_OLD(int, __pthread_key_create, (pthread_key_t * key, void (*destroy)(void*)), (key, destroy))
AS_OF_OLD(float, logf, (float value), (value))
AS_OF_OLD(double, pow, (double base, double exponent), (base, exponent))

extern "C" {

// Whether the C++ library may do without atomic instructions.
char __libc_single_threaded = 0;

// Have a thread's variable destroyed when the thread ends; before glibc 2.18 it is left.
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library) {
  using Register = int (*)(void (*)(void*), void*, void*);
  static const auto found = reinterpret_cast<Register>(dlsym(RTLD_DEFAULT, "__cxa_thread_atexit_impl"));
  return found ? found(destroy, object, library) : 0;
}
}
